"""Continues token sequences: a KV cache, a program for each bucket of lengths, a choice of tokens.

The prompts fill a key/value cache at once, then a loop adds one token to every row until all rows
are done. It compiles once per (batch, lengths rounded up to powers of two): settings are data.

Prompts lie in one batch left-aligned; what fills the shorter ones up has another segment. Positions
count a row's tokens, not cache slots. A row's random numbers come from the seed, the token's index,
and the number of equal prompts before it: its text does not depend on the other rows, and copies of
a prompt are different samples.

Letters: B rows, P prompt slots, M slots for new tokens, T positions, V vocabulary.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from llmx import sharding
from llmx.model import families
from llmx.model.apply import Apply
from llmx.model.execution import Execution
from llmx.model.experts import config as experts_config

# Segments in the cache: the row's text, and what fills the row up. Empty slots are -1.
TEXT, FILLING = 0, -2

# Sizes are rounded up to powers of two, but not below this: short prompts share one program.
SMALLEST_BUCKET = 32


def sampling_mask(
    logits_BV: Float[Array, "B V"], temperature: Array, top_k: Array, top_p: Array
) -> Bool[Array, "B V"]:
    """The tokens that sampling may pick: exactly k, then the smallest nucleus of these.

    Of equal logits the lower token id counts as the likelier (arXiv 1904.09751 for the nucleus).
    Nothing is sorted: the least logit that stays is found by bisection, in 32 passes over a row.
    """
    keys_BV, num_tokens = _ordered(logits_BV), logits_BV.shape[1]

    def largest():
        def at_least(limit_B1):
            return (keys_BV >= limit_B1).sum(axis=-1, keepdims=True) >= top_k

        limit_B1 = _largest_limit(at_least, num_rows=len(keys_BV))
        above_BV = keys_BV > limit_B1
        room_B1 = top_k - above_BV.sum(axis=-1, keepdims=True)
        return above_BV | _first(keys_BV == limit_B1, room_B1)

    def nucleus(first_BV):
        scores_BV = jnp.where(first_BV, _tempered(logits_BV, temperature), -jnp.inf)
        weights_BV = jax.nn.softmax(scores_BV, axis=-1)
        mass = lambda of_BV: jnp.where(of_BV, weights_BV, 0).sum(axis=-1, keepdims=True)  # noqa: E731
        limit_B1 = _largest_limit(
            lambda limit_B1: mass(keys_BV >= limit_B1) >= top_p, num_rows=len(keys_BV)
        )
        above_BV, equal_BV = keys_BV > limit_B1, first_BV & (keys_BV == limit_B1)
        # As many of the equal ones as the rest needs: at least one.
        each_B1 = mass(equal_BV) / jnp.maximum(equal_BV.sum(axis=-1, keepdims=True), 1)
        lacking_B1 = (top_p - mass(above_BV)) / jnp.where(each_B1 > 0, each_B1, 1)
        return first_BV & (above_BV | _first(equal_BV, jnp.maximum(jnp.ceil(lacking_B1), 1)))

    everything = lambda: jnp.ones_like(keys_BV, bool)  # noqa: E731
    limited = (top_k > 0) & (top_k < num_tokens)
    first_BV = jax.lax.cond(limited, largest, everything)
    return jax.lax.cond(top_p < 1, nucleus, lambda first_BV: first_BV, first_BV)


def _ordered(logits_BV: Array) -> Array:
    """uint32 numbers in the order of fp32 ones; -0 is 0."""
    logits_BV = jnp.where(logits_BV == 0, 0.0, logits_BV.astype(jnp.float32))
    bits = jax.lax.bitcast_convert_type(logits_BV, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest_limit(holds: Callable[[Array], Array], *, num_rows: int) -> Array:
    """The largest uint32 [B, 1] for which `holds` is true, where it is true for all smaller ones;
    0 where it never is."""

    def with_bit(index, limit_B1):
        tried_B1 = limit_B1 | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        return jnp.where(holds(tried_B1), tried_B1, limit_B1)

    return jax.lax.fori_loop(0, 32, with_bit, jnp.zeros((num_rows, 1), jnp.uint32))


def _first(mask_BV: Array, count_B1: Array) -> Array:
    """The first of the true ones of each row, as many as `count_B1`."""
    return mask_BV & (jnp.cumsum(mask_BV, axis=-1) <= count_B1)


def pick(
    logits_BV: Float[Array, "B V"], keys_B: Array, temperature: Array, top_k: Array, top_p: Array
) -> Int[Array, " B"]:
    """One token per row: the likeliest at temperature 0, else one of `sampling_mask`."""

    def sample():
        allowed_BV = sampling_mask(logits_BV, temperature, top_k, top_p)
        scores_BV = jnp.where(allowed_BV, _tempered(logits_BV, temperature), -jnp.inf)
        return jax.vmap(jax.random.categorical)(keys_B, scores_BV).astype(jnp.int32)

    def likeliest():
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    return jax.lax.cond(temperature > 0, sample, likeliest)


def _tempered(logits_BV, temperature):
    # From the maximum down, so that a tiny temperature does not overflow.
    top_B1 = logits_BV.max(axis=-1, keepdims=True)
    return (logits_BV - top_B1) / jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)


def generate(
    apply: Apply, params: dict, execution: Execution, prompts: Sequence[Sequence[int]], *,
    max_tokens: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    seed: int = 0, stop_tokens: Sequence[int] = (),
) -> list[list[int]]:  # fmt: skip
    """Continues each prompt by up to `max_tokens` tokens; the prompts themselves are not returned.

    Args:
      apply, params, execution: a decoder, its parameters on `execution.place.mesh`, in any layout.
        Rows are split over the batch axes where their number divides.
      prompts: token ids, at least one in each.
      max_tokens: most tokens to add to a row.
      temperature: divides the logits; 0 = always the likeliest token.
      top_k: sample from the k likeliest tokens only; 0 = all.
      top_p: then only from the fewest of those whose probability reaches this; 1 = all.
      stop_tokens: each ends a row and is not returned; none = rows end at `max_tokens` only.

    Communicates over the mesh axes that split `params`. All processes call it alike.

    Raises ValueError for the texts of `prompt_problems` and `sampling_problems`.
    """
    settings = (max_tokens, temperature, top_k, top_p, seed, stop_tokens)
    mesh, num_rows = execution.place.mesh, len(prompts)
    program = _make_program(apply, execution, _splits_rows(execution, num_rows))
    with jax.set_mesh(mesh):
        inputs = jax.device_put(_inputs(apply.model, prompts, *settings), _whole(mesh))
        out = program(params, inputs, num_slots=_bucket(max_tokens))
    texts_BM, counts_B = jax.device_get(out)
    return [texts_BM[row, : counts_B[row]].tolist() for row in range(num_rows)]


def stream(
    apply: Apply, params: dict, execution: Execution, prompts: Sequence[Sequence[int]], *,
    max_tokens: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    seed: int = 0, stop_tokens: Sequence[int] = (), block: int = 4,
) -> Iterator[list[list[int]]]:  # fmt: skip
    """The tokens of `generate` as they come: what each row has gained, after every `block` steps.

    A caller that has enough may leave the iterator. Arguments and errors are those of `generate`.
    """
    settings = (max_tokens, temperature, top_k, top_p, seed, stop_tokens)
    mesh, num_rows = execution.place.mesh, len(prompts)
    begin, go_on = _make_steps(apply, execution, _splits_rows(execution, num_rows))
    with jax.set_mesh(mesh):
        inputs = jax.device_put(_inputs(apply.model, prompts, *settings), _whole(mesh))
        carry = begin(params, inputs, num_slots=_bucket(max_tokens))
    until, shown = 0, [0] * num_rows
    while until < max_tokens:
        until = min(until + block, max_tokens)
        with jax.set_mesh(mesh):
            limit = jax.device_put(np.array(until, np.int32), _whole(mesh))
            carry = go_on(params, inputs, carry, limit)
            done_B, texts_BM, counts_B = jax.device_get(carry[3:])
        yield [texts_BM[row, shown[row] : counts_B[row]].tolist() for row in range(num_rows)]
        shown = counts_B.tolist()
        if done_B.all():
            return


def _whole(mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def _splits_rows(execution: Execution, num_rows: int) -> bool:
    """One sharding per program: batches that divide over the batch axes, and the others."""
    axes = [axis for axis in sharding.BATCH_AXES if axis in execution.place.mesh.shape]
    return num_rows % execution.place.size(axes) == 0


def _inputs(
    model: families.ModelConfig, prompts: Sequence[Sequence[int]], max_tokens: int,
    temperature: float, top_k: int, top_p: float, seed: int, stop_tokens: Sequence[int],
) -> dict[str, np.ndarray]:  # fmt: skip
    """Prompts and settings as arrays. Raises ValueError for what `generate` refuses."""
    problems = prompt_problems(model, prompts, max_tokens)
    if problems := [*problems, *sampling_problems(temperature, top_k, top_p)]:
        raise ValueError("\n".join(problems))
    stops = np.full(max(8, 1 << (len(stop_tokens) - 1).bit_length()), -1, np.int32)
    stops[: len(stop_tokens)] = stop_tokens
    return _prompt_inputs(prompts) | {
        "seed": np.array(seed % 2**32, np.uint32),
        "max_tokens": np.array(max_tokens, np.int32),
        "stop_tokens": stops,
        "temperature": np.array(temperature, np.float32),
        "top_k": np.array(top_k, np.int32),
        "top_p": np.array(top_p, np.float32),
    }


def _prompt_inputs(prompts: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Prompts as arrays: tokens filled up to a bucket, the last token and lengths without it."""
    # The loop begins with the last token of a prompt.
    lengths = [len(prompt) - 1 for prompt in prompts]
    tokens_BP = np.zeros((len(prompts), _bucket(max(lengths))), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BP[row, : lengths[row]] = prompt[:-1]
    # How many equal prompts come before each: it distinguishes the samples of one prompt.
    seen = collections.defaultdict(itertools.count)
    copies = [next(seen[tuple(prompt)]) for prompt in prompts]
    return {
        "tokens_BP": tokens_BP,
        "last_B": np.array([prompt[-1] for prompt in prompts], np.int32),
        "lengths_B": np.array(lengths, np.int32),
        "copies_B": np.array(copies, np.uint32),
    }


def prompt_problems(
    model: families.ModelConfig, prompts: Sequence[Sequence[int]], max_tokens: int
) -> Iterator[str]:
    """What is wrong with prompts and `max_tokens`, each problem with its remedy.

    `max_positions` limits rotary positions too, as the model was not trained beyond it.
    """
    if not prompts:
        yield "there are no prompts: give at least one"
    if max_tokens < 1:
        yield f"max_tokens={max_tokens} must be at least 1"
    for number, prompt in enumerate(prompts, 1):
        if not len(prompt):
            yield f"prompt {number} is empty: give at least one token to continue from"
            continue
        if bad := [token for token in prompt if not 0 <= token < model.vocab_size]:
            yield (
                f"prompt {number} has token {bad[0]}, and the vocabulary has {model.vocab_size} "
                "tokens: encode it with the tokenizer that the model was trained with"
            )
        room = model.max_positions - len(prompt)
        if max_tokens >= 1 and max_tokens > room:
            remedy = f"use max_tokens of at most {room}" if room > 0 else "use a shorter prompt"
            yield (
                f"prompt {number} of {len(prompt)} tokens and max_tokens={max_tokens} make "
                f"{len(prompt) + max_tokens} positions, and the model has "
                f"max_positions={model.max_positions}: {remedy}"
            )


def sampling_problems(temperature: float, top_k: int, top_p: float) -> Iterator[str]:
    """What is wrong with the settings of sampling, each problem with its remedy."""
    if not 0 <= temperature < float("inf"):
        yield (
            f"temperature={temperature} must be at least 0 and finite: 0 takes the likeliest "
            "token, 1 samples from the model's own probabilities"
        )
    if top_k < 0:
        yield f"top_k={top_k} must not be negative: 0 switches it off"
    if not 0 < top_p <= 1:
        yield f"top_p={top_p} must be above 0 and at most 1: 1 switches it off"


def _bucket(size: int) -> int:
    """`size` rounded up to a power of two."""
    return max(SMALLEST_BUCKET, 1 << (size - 1).bit_length())


def placement(place: sharding.Placement, *, split_batch: bool) -> sharding.Placement:
    """`place` for decoding: positions are not split, as there is one; rows if `split_batch`."""
    names = ("sequence", "block_sequence", *(() if split_batch else ("batch",)))
    activations = dict(place.layout.activations) | dict.fromkeys(names, ())
    layout = dataclasses.replace(place.layout, activations=activations)
    return dataclasses.replace(place, layout=layout)


# Functions are compiled once for as long as the model and its execution are the same objects.
@functools.lru_cache(maxsize=8)
def _make_program(apply: Apply, execution: Execution, split_batch: bool) -> Callable:
    """The jitted (params, inputs, num_slots=) -> (tokens [B, num_slots], how many of them [B])."""
    begin, go_on = _parts(apply, execution, split_batch)

    def program(params, inputs, *, num_slots: int):
        carry = begin(params, inputs, num_slots=num_slots)
        *_, texts_BM, counts_B = go_on(params, inputs, carry, inputs["max_tokens"])
        return texts_BM, counts_B

    return jax.jit(program, static_argnames="num_slots")


@functools.lru_cache(maxsize=8)
def _make_steps(apply: Apply, execution: Execution, split_batch: bool) -> tuple[Callable, Callable]:
    """The same in two programs, `_parts`, of which the second runs again and again."""
    begin, go_on = _parts(apply, execution, split_batch)
    return jax.jit(begin, static_argnames="num_slots"), jax.jit(go_on, donate_argnums=2)


def _parts(apply: Apply, execution: Execution, split_batch: bool) -> tuple[Callable, Callable]:
    """(params, inputs, num_slots=) -> carry, and (params, inputs, carry, until) -> carry.

    The first reads the prompts, the second adds tokens up to number `until`.
    """
    place = placement(execution.place, split_batch=split_batch)
    # What a token becomes must not depend on how many there are: nothing is dropped.
    routed = dataclasses.replace(execution.experts, dispatch=experts_config.DROPLESS)
    execution = dataclasses.replace(execution, place=place, remat="none", experts=routed)

    def decode(params, cache, tokens_BT, segments_BT, positions_BT, now):
        logits_BTV, cache = apply.decode(
            params, cache, tokens_BT, segments_BT, positions_BT, now, execution
        )
        logits_BTV = sharding.constrain(logits_BTV, place.mesh, PartitionSpec())
        # Padding is cut off: what does not exist cannot be picked.
        return logits_BTV[:, -1, : apply.model.vocab_size], cache

    def begin(params, inputs, *, num_slots: int):
        num_rows, num_prompt = inputs["tokens_BP"].shape
        lengths_B = inputs["lengths_B"]
        slots_BP = jnp.broadcast_to(jnp.arange(num_prompt), (num_rows, num_prompt))
        is_text_BP = slots_BP < lengths_B[:, None]
        cache = apply.empty_cache(num_rows, num_prompt + num_slots, execution)
        # Their logits are not used, and so never computed.
        _, cache = decode(
            params, cache, inputs["tokens_BP"], jnp.where(is_text_BP, TEXT, FILLING),
            jnp.where(is_text_BP, slots_BP, 0), 0,
        )  # fmt: skip
        return (
            jnp.zeros((), jnp.int32), cache, inputs["last_B"], jnp.zeros(num_rows, bool),
            jnp.zeros((num_rows, num_slots), jnp.int32), jnp.zeros(num_rows, jnp.int32),
        )  # fmt: skip

    def go_on(params, inputs, carry, until):
        (num_rows, num_prompt), lengths_B = inputs["tokens_BP"].shape, inputs["lengths_B"]
        seed_key = jax.random.key(inputs["seed"])
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(seed_key, inputs["copies_B"])

        def unfinished(carry):
            index, _, _, done_B, *_ = carry
            return (index < until) & ~done_B.all()

        def step(carry):
            index, cache, token_B, done_B, texts_BM, counts_B = carry
            logits_BV, cache = decode(
                params, cache, token_B[:, None], jnp.full((num_rows, 1), TEXT),
                (lengths_B + index)[:, None], num_prompt + index,
            )  # fmt: skip
            step_keys_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, index)
            how = (inputs[name] for name in ("temperature", "top_k", "top_p"))
            token_B = pick(logits_BV, step_keys_B, *how)
            done_B |= (token_B[:, None] == inputs["stop_tokens"]).any(axis=1)
            texts_BM = jax.lax.dynamic_update_index_in_dim(texts_BM, token_B, index, axis=1)
            counts_B += jnp.where(done_B, 0, 1)
            return index + 1, cache, token_B, done_B, texts_BM, counts_B

        return jax.lax.while_loop(unfinished, step, carry)

    return begin, go_on
