"""Times of single operators on the first device of this machine, as a compiled program runs them.

Each operator runs many times in a loop of one program: the time to call a program is measured with
no turn of the loop and taken off. The least of several repeats counts: others on the machine only
make it longer. A number of the result goes back into an operand, so that no turn can be left out.

Where a process may use one core only (`taskset -c 0`), its CPU time is counted, which does not pass
while others have the core. What others do on the other cores still slows this one, by half on some
machines: on CPUs a product of fixed size is timed beside each repeat, and repeats go on until some
of them met a quiet machine, or for a few seconds.

Letters: B batch, T positions, N query heads, K key/value heads, H head size.
"""

import functools
import math
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from llmx.model.attention import attend
from llmx.model.attention.masks import Mask, Scores

REPEATS = 4  # on a quiet machine
TURNS_SECONDS = 0.02  # of one repeat, about
MORE, MOST_TURNS = 8, 100_000  # powers of MORE are tried, until they take an eighth of that
MOST_SECONDS = 2.0  # of all repeats of an operator
BUSY = 1.1  # times the least time of the same product: the machine is not quiet

TURN_BY_TURN = {"xla_gpu_enable_while_loop_double_buffering": False}

# Which dimensions of both factors a product sums over, by what it computes.
ROLES = {"forward": (1, 0), "input gradient": (1, 1), "weight gradient": (0, 0)}

Body = Callable[[Any], Any]


def clock() -> float:
    """Seconds, by the clock of the machine; on one core those that the process computed."""
    alone = jax.default_backend() == "cpu" and len(os.sched_getaffinity(0)) == 1
    return time.process_time() if alone else time.perf_counter()


class Quiet:
    """Says whether the machine is as fast as it ever was to this process."""

    def __init__(self) -> None:
        x = _numbers((256, 256), "float32")
        turn = lambda _, x: (x @ x) * jnp.float32(1e-2)  # noqa: E731
        self._run = jax.jit(lambda x: jax.lax.fori_loop(0, 8, turn, x))
        self._x, self._best = x, math.inf
        jax.block_until_ready(self._run(x))
        for _ in range(20):
            self()

    def __call__(self) -> bool:
        begun = clock()
        jax.block_until_ready(self._run(self._x))
        seconds = clock() - begun
        self._best = min(self._best, seconds)
        return seconds <= BUSY * self._best


@functools.cache
def _quiet() -> Callable[[], bool]:
    return Quiet() if jax.default_backend() == "cpu" else lambda: True


def least(sample: Callable[[], float], *, enough: int = REPEATS, most: float = MOST_SECONDS):
    """The least of samples, seconds: `enough` on a quiet machine, or as many as `most` seconds
    have, two at least."""
    quiet, found, good = _quiet(), [], 0
    begun, before = time.perf_counter(), _quiet()()
    while len(found) < 2 or (good < enough and time.perf_counter() - begun < most):
        found.append(sample())
        after = quiet()
        good += before and after
        before = after
    return min(found)


def seconds_of(body: Body, carry: Any) -> float:
    """The time of one turn of `carry = body(carry)`, arrays; carry is used up."""
    loop = loop_of(body)

    def run(turns: int) -> float:
        nonlocal carry
        begun = clock()
        carry = jax.block_until_ready(loop(carry, turns))
        return clock() - begun

    run(1)  # compiles
    run(0)
    call = min(run(0) for _ in range(3))
    turns, seconds = 1, run(1) - call
    # One turn may take less than calls differ by. On GPUs each number of turns is compiled.
    while not _on_gpu() and seconds < TURNS_SECONDS / MORE and turns < MOST_TURNS:
        turns *= MORE
        seconds = run(turns) - call
    turns = max(1, min(round(TURNS_SECONDS * turns / max(seconds, 1e-7)), MOST_TURNS))
    run(turns)  # compiles, where their number is part of the program
    return max(least(lambda: run(turns)) - call, 1e-9) / turns


def loop_of(body: Body) -> Callable[[Any, int], Any]:
    """(carry, turns) -> carry after so many turns of `carry = body(carry)`; compiled when called.

    On GPUs the host waits in every turn, some 20 us, unless it knows how many there are; and a loop
    of two turns in one (`launch.XLA_FLAGS`) would leave out a product whose result the second turn
    writes over.
    """
    own = {"static_argnums": 1, "compiler_options": TURN_BY_TURN} if _on_gpu() else {}
    return jax.jit(
        lambda carry, turns: jax.lax.fori_loop(0, turns, lambda _, carry: body(carry), carry),
        donate_argnums=0, **own,
    )  # fmt: skip


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def product(m: int, n: int, k: int, dtype: str, role: str) -> float:
    """Seconds of [m, k] x [k, n], both stored as the pass `role` has them."""
    left, right = ROLES[role]
    x = _numbers((m, k) if left else (k, m), dtype)
    w = _numbers((n, k) if right else (k, n), dtype)
    out = "float32" if role == "weight gradient" else dtype

    def multiplied(x, w):
        return jax.lax.dot_general(
            x, w, (((left,), (right,)), ((), ())), preferred_element_type=jnp.dtype(out)
        )

    def body(carry):
        x, w, _ = carry
        y = multiplied(x, w)
        return x.at[0, 0].add((y[0, 0] * 1e-6).astype(x.dtype)), w, y

    def on_gpu(carry):  # where a change of one number writes all of x
        x, w, y = carry
        x_behind_y, _ = jax.lax.optimization_barrier((x, y))
        return x, w, multiplied(x_behind_y, w)

    return seconds_of(on_gpu if _on_gpu() else body, (x, w, jnp.zeros((m, n), out)))


def move(num_bytes: int) -> float:
    """Seconds to read and write an fp32 array of so many bytes."""
    x = _numbers((max(1, num_bytes // 4),), "float32")
    return seconds_of(lambda x: x * jnp.float32(0.999) + jnp.float32(0.5), x)


def start() -> float:
    """Seconds of an operator that computes next to nothing, by a turn of a loop that has it: on
    GPUs the loop's counter is a second one."""
    turn = seconds_of(lambda x: x * jnp.float32(0.999) + jnp.float32(0.5), jnp.zeros((8,)))
    return turn / 2 if _on_gpu() else turn


def first_touch(num_bytes: int) -> float:
    """Seconds of the first write to so many bytes of new memory."""
    fill = jax.jit(lambda value: jnp.full((num_bytes // 4,), value))

    def sample() -> float:
        begun = clock()
        array = jax.block_until_ready(fill(jnp.float32(1)))
        seconds = clock() - begun
        array.delete()
        return seconds

    sample()  # compiles
    return least(sample)


def attention(
    batch: int, length: int, heads: int, kv_heads: int, head_dim: int, dtype: str, passes: int
) -> float:
    """Seconds of causal attention over one document a row.

    `passes`: 1 = forward, 2 = forward and backward.
    """
    device = jax.devices()[0]
    kernel = attend.kernel_for("auto", device.platform)
    B, T, N, K, H = batch, length, heads, kv_heads, head_dim
    segments = jnp.ones((B, T), jnp.int32)
    mask = Mask(segments, None, segments, None, ahead=0, one_document=True)
    scores = Scores(H**-0.5)
    query, key, value = (_numbers((B, T, of, H), dtype) for of in (N, K, K))

    def attended(*arrays):
        return kernel(*arrays, mask, scores, device_kind=device.device_kind)

    def forward(carry):
        (query, key, value), _ = carry
        out = attended(query, key, value)
        return (query.at[0, 0, 0, 0].add(out[0, 0, 0, 0] * 1e-3), key, value), out

    def both(carry):
        arrays, _ = carry
        out, pull = jax.vjp(attended, *arrays)
        gradients = pull(out)
        query = arrays[0].at[0, 0, 0, 0].add(gradients[0][0, 0, 0, 0] * 1e-3)
        return (query, *arrays[1:]), (out, *gradients)

    arrays = (query, key, value)
    if passes == 1:
        return seconds_of(forward, (arrays, query + 0))
    return seconds_of(both, (arrays, (query + 0, query + 0, key + 0, value + 0)))


def all_reduce(num_bytes: int) -> float:
    """Seconds to sum an fp32 array of so many bytes over all devices of this process."""
    mesh = jax.make_mesh((jax.device_count(),), ("devices",))
    size = max(1, num_bytes // 4)
    whole = PartitionSpec("devices")

    def body(x):
        return jax.lax.psum(x, "devices") * jnp.float32(1 / jax.device_count())

    over = jax.shard_map(body, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    x = jax.device_put(
        np.ones((jax.device_count() * size,), np.float32),
        jax.sharding.NamedSharding(mesh, whole),
    )
    return seconds_of(over, x)


def _numbers(shape: tuple[int, ...], dtype: str) -> jax.Array:
    numbers = np.random.default_rng(0).standard_normal(shape, np.float32)
    return jnp.asarray(numbers, dtype)
