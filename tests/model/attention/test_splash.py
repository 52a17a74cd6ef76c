"""The splash kernel equals reference attention; on a TPU it is what "auto" compiles to."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmx import sharding
from llmx.aot import topologies
from llmx.model import remat
from llmx.model.attention import attend, splash
from llmx.model.attention import attend as attend_lib
from llmx.model.attention.kernel import NOTHING, first_of
from llmx.model.attention.masks import Mask, Scores

# fp32 in the kernel's interpreter: sums in blocks of 128 keys in another order.
VALUE = dict(rtol=1e-5, atol=1e-5)
GRADIENT = dict(rtol=1e-4, atol=3e-5)
# bf16 has 8 bits, and the weights of the softmax are rounded to it before they meet the values.
BF16 = dict(rtol=2e-2, atol=2e-2)

B, T = 2, 384  # three blocks of 128


@dataclasses.dataclass(frozen=True)
class Case:
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 0  # 0 = the same
    packed: bool = True
    window: int = 0
    softcap: float = 0.0

    @property
    def scores(self) -> Scores:
        scale = 1 / math.sqrt(self.head_dim)
        return Scores(scale=scale, window=self.window, softcap=self.softcap)


CASES = {
    "causal": Case(packed=False),
    "packed": Case(),
    "group4": Case(heads=4, kv_heads=1),
    "group2": Case(heads=4),
    "window_in_a_block": Case(window=50),
    "window_over_blocks": Case(window=200, packed=False),
    "window1": Case(window=1),
    "softcap": Case(softcap=1.0),
    "head128": Case(head_dim=128, packed=False),
    "head160": Case(head_dim=160, packed=False),
    "narrow_values": Case(heads=4, head_dim=136, value_dim=24),
    "all": Case(heads=4, head_dim=16, window=130, softcap=2.0),
}


def mask_of(case: Case, *, batch: int = B) -> Mask:
    """Documents that end inside blocks, on their edges, and after one token."""
    lengths = [[100, 1, 27, 128, 128], [200, 184]] if case.packed else [[T], [T]]
    segments = np.stack([np.repeat(np.arange(len(row)), row) for row in lengths])
    positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in lengths])
    arrays = [
        jnp.asarray(np.tile(array, (batch // 2, 1)), jnp.int32) for array in (segments, positions)
    ]
    return Mask(*arrays, *arrays, ahead=0)


def inputs(case: Case, *, batch: int = B, dtype: str = "float32"):
    rng = np.random.default_rng(0)
    query = (batch, T, case.heads, case.head_dim)
    key = (batch, T, case.kv_heads, case.head_dim)
    V = case.value_dim or case.head_dim
    shapes = (query, key, (*key[:-1], V), (*query[:-1], V))
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def test_rows_of_one_document_need_no_segments():
    """Padding after the text sees it, which nobody counts; the text and its gradients are the
    same."""
    case = Case(heads=4, packed=False)
    query, key, value, gradient = inputs(case)
    counts = jnp.arange(T) < 300
    segments = jnp.broadcast_to(counts.astype(jnp.int32), (B, T))
    gradient = gradient * counts[None, :, None, None]

    @functools.partial(jax.jit, static_argnums=0)
    def run(name, arrays, gradient):
        mask = Mask(segments, None, segments, None, ahead=0, one_document=True)
        kernel = attend.IMPLEMENTATIONS[name]
        out, pull = jax.vjp(
            lambda *arrays: kernel(*arrays, mask, case.scores, device_kind="cpu"), *arrays
        )
        return out[:, :300], *pull(gradient)

    found = run("splash", (query, key, value), gradient)
    for got, to_be in zip(found, run("reference", (query, key, value), gradient), strict=True):
        np.testing.assert_allclose(got, to_be, **GRADIENT)


TILE = 128


@pytest.mark.parametrize(
    "name, ahead",
    [
        ("packed", 0), ("packed", 1), ("packed", 2), ("window_in_a_block", 1),
        ("window_over_blocks", 1), ("window_over_blocks", 2), ("all", 1),
    ],
)  # fmt: skip
def test_parts_add_up_to_the_whole(name, ahead):
    """A chunk of keys some chunks before the queries: value, log-sum-exp, and gradients that are
    shares of the whole's. With a window some queries see none of them."""
    case = CASES[name]
    mask = mask_of(case)
    queries, keys = slice(2 * TILE, None), slice((2 - ahead) * TILE, (3 - ahead) * TILE)
    segments = mask.segments_BT
    tile = Mask(segments[:, queries], None, segments[:, keys], None, ahead=ahead * TILE)
    query, key, value, gradient = inputs(case)
    arrays = (query[:, queries], key[:, keys], value[:, keys])
    rng = np.random.default_rng(1)
    shape = (B, case.heads, TILE)
    # Those of the whole: at least the part's own.
    reference = attend.IMPLEMENTATIONS["reference"]
    given = reference.forward(*arrays, tile, case.scores, device_kind="cpu")
    lse = jnp.maximum(given[1], 0) + jnp.asarray(rng.random(shape), jnp.float32)
    out = jnp.asarray(rng.standard_normal(query[:, queries].shape), jnp.float32)

    def run(name):
        kernel = attend.IMPLEMENTATIONS[name]

        @jax.jit
        def both(arrays, out, lse, gradient):
            part = kernel.forward(*arrays, tile, case.scores, device_kind="cpu")
            found = kernel.gradients(
                *arrays, tile, case.scores, out, lse, gradient, device_kind="cpu"
            )
            return *part, *found

        return both(arrays, out, lse, gradient[:, queries])

    seen = np.asarray(tile.visible(case.window)).any(axis=2)
    wanted = run("reference")
    for name in ("splash", "blockwise"):
        got = run(name)
        np.testing.assert_allclose(got[0][seen], wanted[0][seen], **VALUE)
        lse_BTN, wanted_BTN = got[1].swapaxes(1, 2), wanted[1].swapaxes(1, 2)
        np.testing.assert_allclose(lse_BTN[seen], wanted_BTN[seen], **VALUE)
        assert (lse_BTN[~seen] <= NOTHING).all() and np.isfinite(got[0]).all()
        for array, to_be in zip(got[2:], wanted[2:], strict=True):
            np.testing.assert_allclose(array, to_be, **GRADIENT)


def value_and_gradients(name: str, case: Case, *, dtype: str = "float32"):
    *arrays, cotangent = inputs(case, dtype=dtype)
    kernel = functools.partial(attend.IMPLEMENTATIONS[name], device_kind="cpu")

    def both(arrays, mask, cotangent):
        out, pull = jax.vjp(lambda *arrays: kernel(*arrays, mask, case.scores), *arrays)
        return out, *pull(cotangent)

    results = jax.jit(both)(arrays, mask_of(case), cotangent)
    return [np.asarray(array, np.float32) for array in results]


@pytest.mark.parametrize("name", CASES)
def test_splash_equals_reference(name):
    case = CASES[name]
    value, *gradients = value_and_gradients("splash", case)
    want_value, *want = value_and_gradients("reference", case)
    np.testing.assert_allclose(value, want_value, **VALUE)
    for which, got, to_be in zip(("query", "key", "value"), gradients, want, strict=True):
        np.testing.assert_allclose(got, to_be, **GRADIENT, err_msg=f"gradient of {which}")


@pytest.mark.parametrize("name", ["packed", "window_in_a_block", "window_over_blocks"])
@pytest.mark.parametrize("ahead", [0, 256])
def test_gradients_by_slices_of_keys(monkeypatch, name, ahead):
    """Long rows go through the backward kernel a slice of keys at a time: here every block."""
    case = CASES[name]
    query, key, value, gradient = inputs(case)
    mask = mask_of(case)
    if ahead:  # the last queries, and the keys up to their own or before
        rows, keys = slice(256, T), slice(0, T if case.window else 256)
        query, gradient, key, value = (
            query[:, rows],
            gradient[:, rows],
            key[:, keys],
            value[:, keys],
        )
        segments = mask.segments_BT
        mask = Mask(segments[:, rows], None, segments[:, keys], None, ahead=ahead)
    out, lse = splash.SPLASH.forward(query, key, value, mask, case.scores, device_kind="cpu")

    def gradients():
        # A new function each time: what it reads of the module has changed.
        return jax.jit(
            lambda *arrays: splash.SPLASH.backward(
                *arrays[:3], mask, case.scores, *arrays[3:], device_kind="cpu"
            )
        )(query, key, value, out, lse, gradient)

    wanted = gradients()
    monkeypatch.setattr(splash, "OTHER_BLOCKS", splash.Blocks(*(128,) * 6))
    monkeypatch.setattr(splash, "MOST_BLOCKS", 1)
    assert splash._slice_of_keys(key.shape[1], case.head_dim, "cpu") == 128
    for got, to_be in zip(gradients(), wanted, strict=True):
        np.testing.assert_allclose(got, to_be, **GRADIENT)


def test_splash_in_bf16():
    case = CASES["group2"]
    got = value_and_gradients("splash", case, dtype="bfloat16")
    want = value_and_gradients("reference", case)
    for array, to_be in zip(got, want, strict=True):
        assert np.linalg.norm(array - to_be) / np.linalg.norm(to_be) < BF16["rtol"]


def test_what_is_not_seen_has_no_influence():
    """Bit for bit: keys and values of other documents, of the future, and beyond the window."""
    case = CASES["window_in_a_block"]
    query, key, value, _ = inputs(case)
    mask = mask_of(case)
    run = jax.jit(
        lambda key, value: splash.SPLASH(query, key, value, mask, case.scores, device_kind="cpu")
    )
    seen_BTS = np.asarray(mask.visible(case.window))
    before = np.asarray(run(key, value))
    for slot in (0, 100, 127, 128, 255, T - 1):
        after = np.asarray(run(key.at[:, slot].add(3.0), value.at[:, slot].add(-5.0)))
        changed_BT = (after != before).any(axis=(2, 3))
        np.testing.assert_array_equal(changed_BT, seen_BTS[:, :, slot])


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_splash_on_a_mesh_equals_one_device(kv_heads):
    """Heads over `tensor`, K/V heads split or whole, batch over `fsdp`: as the model calls it."""
    case = Case(heads=4, kv_heads=kv_heads)
    *arrays, cotangent = inputs(case, batch=4)
    mask = mask_of(case, batch=4)

    def run(sizes: dict, name: str):
        devices = jax.devices()[: math.prod(sizes.values())]
        mesh = sharding.make_mesh(
            {axis: sizes.get(axis, 1) for axis in sharding.AXES}, devices=devices
        )
        layout = sharding.make_layout("zero3", replicate_kv=kv_heads < 4)
        place = sharding.Placement(mesh, layout)

        def both(arrays, mask, cotangent):
            attend = lambda *arrays: attend_lib.attend(  # noqa: E731
                *arrays, mask, case.scores, config=attend_lib.AttentionConfig(name), place=place
            )
            out, pull = jax.vjp(attend, *arrays)
            return out, *pull(cotangent)

        heads = ("batch", "sequence", "heads", "head_dim")
        kv = ("batch", "sequence", "kv_heads", "head_dim")
        put = lambda array, axes: jax.device_put(  # noqa: E731
            array, jax.NamedSharding(mesh, place.activation(axes, array.shape))
        )
        given = [put(a, axes) for a, axes in zip(arrays, (heads, kv, kv), strict=True)]
        placed_mask = jax.tree.map(lambda array: put(array, ("batch", "sequence")), mask)
        with jax.set_mesh(mesh):
            return jax.tree.map(
                np.asarray, jax.jit(both)(given, placed_mask, put(cotangent, heads))
            )

    want = run({}, "reference")
    for got, to_be in zip(run({"fsdp": 2, "tensor": 4}, "splash"), want, strict=True):
        np.testing.assert_allclose(got, to_be, **GRADIENT)


def test_what_it_does_not_do_says_why():
    case = Case(packed=False)
    *arrays, _ = inputs(case)
    mask = mask_of(case)
    short = [array[:, :100] for array in arrays]
    cut = Mask(*(array[:, :100] for array in (mask.segments_BT, mask.positions_BT) * 2), ahead=0)
    with pytest.raises(
        NotImplementedError, match="100 queries and 100 keys are not multiples of 128"
    ):
        splash.SPLASH(*short, cut, case.scores, device_kind="cpu")
    with pytest.raises(NotImplementedError, match="in order"):
        loose = dataclasses.replace(mask, ahead=None)
        splash.SPLASH(*arrays, loose, case.scores, device_kind="cpu")
    with pytest.raises(NotImplementedError, match="H100"):
        splash.SPLASH(*arrays, mask, case.scores, device_kind="NVIDIA H100 80GB HBM3")


def test_the_next_kernel_takes_what_splash_refuses():
    """In both passes: here rows that are no multiple of 128."""
    case, rows, took = Case(packed=False), slice(0, 100), []
    *arrays, gradient = (array[:, rows] for array in inputs(case))
    segments = mask_of(case).segments_BT[:, rows]
    mask = Mask(segments, None, segments, None, ahead=0)
    names = ("splash", "blockwise")
    auto = first_of(
        {name: attend.IMPLEMENTATIONS[name] for name in names}, lambda name, _: took.append(name)
    )

    def both(kernel):
        run = lambda *arrays: kernel(*arrays, mask, case.scores, device_kind="cpu")  # noqa: E731
        out, pull = jax.vjp(run, *arrays)
        return out, *pull(gradient)

    for got, to_be in zip(both(auto), both(attend.IMPLEMENTATIONS["reference"]), strict=True):
        np.testing.assert_allclose(got, to_be, **GRADIENT)
    assert set(took) == {"blockwise"}


def test_blocks_are_cut_to_divisors_of_the_rows():
    blocks = splash.Blocks(512, 1024, 512, 512, 2048, 512)
    sizes = splash._block_sizes(dict, blocks, (256, 384), 1)
    assert sizes["block_q"] == 256
    assert {sizes["block_kv"], sizes["block_kv_dkv"]} == {384}


@pytest.mark.parametrize("blocks", [splash.OTHER_BLOCKS, *splash.BLOCKS.values()][:2])
@pytest.mark.parametrize("row_width", [1, 2])
def test_keys_are_fetched_in_whole_blocks_of_a_product(blocks, row_width):
    """1,536 keys too: blocks of 768 have none of 512."""
    for rows in range(128, 8193, 128):
        sizes = splash._block_sizes(dict, blocks, (rows, rows), row_width)
        for key in ("block_kv", "block_kv_dkv"):
            assert rows % sizes[key] == sizes[key] % sizes[f"{key}_compute"] == 0
        assert max(sizes["block_kv"], sizes["block_q"]) <= blocks.key


# ----------------------------------------------------------------------- compiled for real chips


def compiled(
    topology: str, case: Case, length: int, *, remat_policy: str = "none", batch: int = 1,
    dtype: jnp.dtype = jnp.bfloat16,
) -> str:  # fmt: skip
    """Text of value and gradients of two layers of attention through "auto" on one chip."""
    mesh = sharding.make_mesh({"fsdp": 1}, devices=topologies.devices(topology)[:1])
    place = sharding.Placement(mesh, sharding.make_layout("zero3"))

    def loss(arrays, mask):
        query, key, value = arrays

        def layer(query, _):
            out = attend.attend(
                query,
                key,
                value,
                mask,
                case.scores,
                config=attend.AttentionConfig(),
                place=place,
            )
            return query + jnp.sin(out), None

        layer = remat.checkpointed(layer, remat.POLICIES[remat_policy])
        return jnp.sum(jnp.square(jax.lax.scan(layer, query, None, length=2)[0]))

    whole = jax.NamedSharding(mesh, jax.P())
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, dtype, sharding=whole)  # noqa: E731
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=whole)
    mask = Mask(*(tokens,) * 4, ahead=0)
    query = shape(batch, length, case.heads, case.head_dim)
    key = shape(batch, length, case.kv_heads, case.head_dim)
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss)).lower((query, key, key), mask)
    return lowered.compile().as_text()


def kernels(text: str) -> list[str]:
    return re.findall(r"^ *(?:ROOT )?%(splash_mqa_(?:fwd|dkv|dq))\S* = ", text, flags=re.MULTILINE)


CHIPS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
# A chip for each of the two tables of blocks. Heads and rows that need less of a chip's memory
# than Llama's and Gemma's are compiled for these alone.
OF_TABLES = ("v5e:2x2", "v6e:2x2")
COMPILED = {
    "llama": (Case(heads=8, kv_heads=2, head_dim=128), 8192, CHIPS),
    # Gemma 2 and 3
    "gemma": (Case(heads=8, kv_heads=2, head_dim=256, window=512, softcap=50.0), 8192, CHIPS),
    "gpt2": (Case(heads=4, kv_heads=4, head_dim=64), 1024, OF_TABLES),
    "640_rows": (Case(heads=4, kv_heads=1, head_dim=128), 640, OF_TABLES),  # they cut the blocks
}


@pytest.mark.aot
@pytest.mark.parametrize(
    ("topology", "case", "length"),
    [
        pytest.param(chip, case, length, id=f"{name}-{chip}")
        for name, (case, length, chips) in COMPILED.items()
        for chip in chips
    ],
)
def test_the_blocks_of_every_chip_compile(topology, case, length):
    # Long rows of wide heads take the backward kernel in slices of keys.
    assert set(kernels(compiled(topology, case, length))) == {"splash_mqa_dkv", "splash_mqa_fwd"}


@pytest.mark.aot
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("topology", OF_TABLES)
def test_the_blocks_of_fp32_compile(topology, head_dim):
    """Twice the bytes in a row: with blocks of bf16 the backward kernel asks for 17 of 16 MiB."""
    case = Case(heads=8, kv_heads=2, head_dim=head_dim)
    assert set(kernels(compiled(topology, case, 2048, dtype=jnp.float32))) == {
        "splash_mqa_dkv", "splash_mqa_fwd"
    }  # fmt: skip


@pytest.mark.aot
def test_remat_keeps_what_the_policy_says():
    """Under "names" the backward pass finds output and log-sum-exp; under "full" it runs again."""
    case = Case(heads=4, kv_heads=1, head_dim=128)
    counts = {
        policy: kernels(compiled("v5e:2x2", case, 1024, remat_policy=policy)).count(
            "splash_mqa_fwd"
        )
        for policy in ("full", "names")
    }
    assert counts == {"full": 2, "names": 1}


@pytest.mark.aot
def test_auto_takes_what_fits():
    """Rows that are no multiple of 128 go to the blockwise kernel."""
    assert not kernels(compiled("v5e:2x2", Case(head_dim=128), 200))
