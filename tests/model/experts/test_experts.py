"""Routed experts: equal to each expert on each token, whatever the routing, mesh and buffer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support import compare

from llmx import sharding
from llmx.model import precision
from llmx.model.experts import experts, grouped, router
from llmx.model.experts.config import ExpertsConfig

D, F, E, K, B, T = 16, 12, 24, 2, 24, 8  # experts and rows divide over 2, 3, 4, 6 and 8
TOLERANCE = 1e-6  # of sums in fp32 that are taken in another order


def arrays(
    routing: str = "random", num_experts: int = E, k: int = K, seed: int = 0, biases: bool = False
):
    """x, experts and weights of a routing, and the weights of the experts; NumPy."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(B, T, D)).astype(np.float32)
    chosen = {
        "random": lambda: np.argsort(rng.random((B, T, num_experts)))[..., :k],
        "unbalanced": lambda: np.broadcast_to(np.arange(k), (B, T, k)),
        "one row apart": lambda: np.where(
            np.arange(B)[:, None, None] == 0, np.arange(k), num_experts - 1 - np.arange(k)
        ) + np.zeros((B, T, k), int),
    }[routing]().astype(np.int32)  # fmt: skip
    of = rng.random((B, T, k)).astype(np.float32)
    shapes = ((num_experts, D, F), (num_experts, D, F), (num_experts, F, D))
    if biases:
        shapes += (num_experts, F), (num_experts, F), (num_experts, D)
    return x, chosen, of, tuple(rng.normal(size=s).astype(np.float32) / 4 for s in shapes)


def oracle(x, chosen, of, weights):
    """Token by token, to be differentiated automatically; with biases also clamped."""

    def one(x_D, chosen_k, of_k):
        gate, up, down, *biases = (weight[chosen_k] for weight in weights)
        gate, up = jnp.einsum("d,kdf->kf", x_D, gate), jnp.einsum("d,kdf->kf", x_D, up)
        if not biases:
            return jnp.einsum("kf,kfd,k->d", jax.nn.silu(gate) * up, down, of_k)
        gate, up = jnp.minimum(gate + biases[0], 7), jnp.clip(up + biases[1], -7, 7)
        out = jnp.einsum("kf,kfd->kd", gate * jax.nn.sigmoid(1.702 * gate) * (up + 1), down)
        return of_k @ (out + biases[2])

    return jax.vmap(jax.vmap(one))(x, chosen, of)


@functools.cache
def wanted(routing: str, num_experts: int = E, k: int = K, biases: bool = False, kept: tuple = ()):
    """Result of the oracle, and its gradients by x, routing weights and experts.

    `kept`: of each row, the tokens whose assignments are not dropped; () = all.
    """
    x, chosen, of, weights = arrays(routing, num_experts, k, biases=biases)
    stays_T1 = np.isin(np.arange(T), kept or np.arange(T))[:, None]
    out = np.cos(np.arange(B * T * D)).reshape(B, T, D).astype(np.float32)

    def value(x, of, weights):
        y = oracle(x, chosen, jnp.where(stays_T1, of, 0), weights)
        return jnp.sum(y * out), y

    found = jax.jit(jax.grad(value, argnums=(0, 1, 2), has_aux=True))(x, of, weights)
    return jax.device_get(found), out


def computed(
    mesh_sizes: dict, routing: str, *, layout="zero3", num_experts=E, k=K, biases=False, **keys
):
    """What `wanted` has, by `experts` or `dense` on a mesh."""
    x, chosen, of, weights = arrays(routing, num_experts, k, biases=biases)
    (_, _), out = wanted(routing, num_experts, k, biases)
    sizes = dict.fromkeys(sharding.AXES, 1) | mesh_sizes
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = sharding.make_mesh(sizes, devices=devices)
    place = sharding.Placement(mesh, sharding.make_layout(layout))
    config = ExpertsConfig(**keys)
    axes = (("experts", "embed", "mlp"),) * 2 + (("experts", "mlp", "embed"),)
    if biases:
        axes += (("experts", "mlp"),) * 2 + (("experts", "norm"),)
    to = [
        sharding.spec(names, place.layout.parameters, mesh, shape=weight.shape)
        for names, weight in zip(axes, weights, strict=True)
    ]
    of_tokens = place.activation(("batch", "block_sequence", None))
    put = lambda array, spec: jax.device_put(array, jax.NamedSharding(mesh, spec))  # noqa: E731
    x, chosen, of, out = (put(array, of_tokens) for array in (x, chosen, of, out))
    weights = tuple(map(put, weights, to))
    compute = experts.dense if config.dispatch == "dense" else experts.experts

    def value(x, of, weights):
        going = chosen
        if config.dispatch == "capacity":
            going = experts.within_capacity(chosen, num_experts, config.capacity, place)
        y = compute(
            x, router.Routing(going, of), experts.Weights(*weights),
            activation="clamped_silu" if biases else "silu", config=config, place=place,
            policy=precision.POLICIES["fp32"], out=of_tokens,
        )  # fmt: skip
        return jnp.sum(y * out), y

    with jax.set_mesh(mesh), precision.POLICIES["fp32"].products():
        found = jax.jit(jax.grad(value, argnums=(0, 1, 2), has_aux=True))(x, of, weights)
    return jax.device_get(found)


MESHES = [
    {}, dict(expert=2), dict(expert=3), dict(expert=4), dict(expert=8), dict(expert=2, tensor=2),
    dict(expert=2, sequence=2, fsdp=1), dict(expert=3, fsdp=2), dict(expert=3, tensor=2),
    dict(fsdp=2, sequence=2, tensor=2),
]  # fmt: skip


@pytest.mark.parametrize("routing", ["random", "unbalanced", "one row apart"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_dropless_is_each_token_through_its_experts(mesh, routing):
    """A buffer far below what one device sends another: rows travel in many rounds."""
    found = computed(mesh, routing, buffer=0.3)
    compare.assert_close(found, wanted(routing)[0], TOLERANCE)


@pytest.mark.parametrize("mesh, keys", [
    ({}, {}), ({}, dict(dispatch="dense")), (dict(expert=3, tensor=2), dict(buffer=0.3)),
    (dict(fsdp=2, sequence=2, tensor=2), {}), (dict(fsdp=2, tensor=2), dict(dispatch="dense")),
], ids=str)  # fmt: skip
def test_biases_and_the_clamped_activation(mesh, keys):
    found = computed(mesh, "random", biases=True, **keys)
    compare.assert_close(found, wanted("random", biases=True)[0], TOLERANCE)


@pytest.mark.parametrize("buffer", [0.05, 1.0, 100.0])
def test_the_buffer_changes_nothing(buffer):
    found = computed(dict(expert=3), "random", buffer=buffer)
    compare.assert_close(found, wanted("random")[0], TOLERANCE)


@pytest.mark.parametrize("mesh", [{}, dict(fsdp=2, tensor=2)], ids=str)
def test_dense_is_each_token_through_its_experts(mesh):
    found = computed(mesh, "random", dispatch="dense")
    compare.assert_close(found, wanted("random")[0], TOLERANCE)


@pytest.mark.parametrize("k, num_experts", [(1, 1), (1, 7), (5, 5), (3, 64)])
def test_numbers_of_experts(k, num_experts):
    found = computed({}, "random", num_experts=num_experts, k=k)
    compare.assert_close(found, wanted("random", num_experts, k)[0], TOLERANCE)


def test_the_order_of_tokens_does_not_matter():
    x, chosen, of, weights = arrays("random")
    order = np.random.default_rng(1).permutation(T)
    place = sharding.Placement(
        sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), devices=jax.devices()[:1]),
        sharding.make_layout("zero3"),
    )

    def compute(x, chosen, of):
        with jax.set_mesh(place.mesh):
            return jax.jit(lambda x, chosen, of: experts.experts(
                x, router.Routing(chosen, of), experts.Weights(*weights), activation="silu",
                config=ExpertsConfig(), place=place, policy=precision.POLICIES["fp32"],
                out=PartitionSpec(None, None, None),
            ))(x, chosen, of)  # fmt: skip

    whole = compute(x, chosen, of)
    moved = compute(x[:, order], chosen[:, order], of[:, order])
    np.testing.assert_allclose(moved, np.asarray(whole)[:, order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mesh", [{}, dict(expert=4), dict(sequence=2, fsdp=2)], ids=str)
@pytest.mark.parametrize("capacity, most", [(1.5, 6), (1.2, 4), (0.1, 1)])
def test_capacity_drops_the_last_tokens_of_an_expert(mesh, capacity, most):
    """Of T assignments to one expert the first capacity x T k / E stay, in the order of the row, or
    of its part on a device; value and gradient are those without the others."""
    parts = mesh.get("sequence", 1)
    most = max(most // parts, 1)
    kept = tuple(first + token for first in range(0, T, T // parts) for token in range(most))
    found = computed(mesh, "unbalanced", num_experts=4, dispatch="capacity", capacity=capacity)
    compare.assert_close(found, wanted("unbalanced", 4, kept=kept)[0], TOLERANCE)
    assert not np.delete(found[1], kept, axis=1).any() and found[1][:, kept].any()


# ------------------------------------------------------------------------------------ the products


@pytest.mark.parametrize("rows, num_experts", [(1, 1), (7, 3), (100, 4), (1000, 16)])
def test_blocks_hold_each_row_once_and_of_one_expert(rows, num_experts):
    rng = np.random.default_rng(rows)
    expert = rng.integers(0, num_experts + 1, rows)  # the last: of none
    of = jax.jit(grouped.blocks, static_argnums=1)(expert, num_experts)
    size = of.row_of_slot_R.shape[0] // of.expert_of_block.shape[0]
    for slot, row in enumerate(np.asarray(of.row_of_slot_R)):
        if row < rows:
            assert expert[row] == of.expert_of_block[slot // size]
            assert of.slot_of_row[row] == slot
    placed = np.asarray(of.row_of_slot_R)
    assert sorted(placed[placed < rows]) == list(np.flatnonzero(expert < num_experts))


@pytest.mark.parametrize("rows, num_experts", [(9, 2), (200, 5)])
def test_rows_and_sums_by_block(rows, num_experts):
    rng = np.random.default_rng(0)
    expert = rng.integers(0, num_experts, rows)
    weights = rng.normal(size=(num_experts, D, F)).astype(np.float32)
    x = rng.normal(size=(rows, D)).astype(np.float32)
    of = grouped.blocks(jnp.asarray(expert), num_experts)
    x_RD = jnp.asarray(x).at[of.row_of_slot_R].get(mode="fill", fill_value=0)
    wanted = np.einsum("rd,rdf->rf", x, weights[expert])
    y = grouped.by_block(jnp.dot, x_RD, weights, of)[of.slot_of_row]
    np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=1e-5)

    def with_term(x_bD, weight_DF):
        y_bF = x_bD @ weight_DF
        return y_bF, x_bD.T @ y_bF

    y, sums = grouped.by_block_with_sums(with_term, x_RD, weights, of, jnp.float32)
    np.testing.assert_allclose(y[of.slot_of_row], wanted, rtol=2e-5, atol=1e-5)
    for number in range(num_experts):
        mine = expert == number
        np.testing.assert_allclose(sums[number], x[mine].T @ wanted[mine], rtol=2e-5, atol=1e-4)


def test_an_expert_without_rows_has_no_gradient():
    found = computed(dict(expert=2), "unbalanced")
    for gradient in found[0][2]:
        assert not np.asarray(gradient)[K:].any()
