"""Keys and values in int8: the codes are NumPy's, and what is generated is the same on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model.test_sampling import FAMILIES, PROMPTS, VOCAB, built

from llmx.model import sampling
from llmx.model.attention import attend, cache
from llmx.model.attention.masks import Mask, Scores

# A code is off by half of 1/127 of a head's largest number; random weights are the worst case, of
# deep and narrow models. Of the deviation of the logits.
LOGITS = 0.05
B, S, K, N, H = 2, 12, 2, 4, 8


def in_int8(decoder):
    execution = dataclasses.replace(decoder.execution, kv_cache=cache.INT8)
    return dataclasses.replace(decoder, execution=execution)


def numpy_rounded(array):
    """Codes and scales, one for each token and head."""
    array = np.asarray(array, np.float32)
    amax = np.abs(array).max(axis=-1)
    scale = np.where(amax > 0, amax / np.float32(127), np.float32(1))
    return np.rint(array / scale[..., None]).astype(np.int8), scale


def place_of(**mesh):
    place = built("llama3", tuple(mesh.items())).execution.place
    return sampling.placement(place, split_batch=True)


@pytest.mark.parametrize("mesh", [{}, dict(sequence=2, tensor=2)], ids=str)
def test_codes_and_scales_are_those_of_numpy(mesh):
    """Some tokens at a time, in slots that devices share; a token of zeros stays one."""
    place, random = place_of(**mesh), np.random.default_rng(0)
    new = random.normal(size=(B, S, K, H)).astype(np.float32)
    new[0, 3] = 0
    with jax.set_mesh(place.mesh):
        kept = cache.empty_slots(
            cache.CACHE[1:], (B, S, K, H), kind=cache.INT8, dtype=jnp.float32, place=place
        )
        write = jax.jit(lambda old, new, at: cache.write_slots(old, new, at, place=place))
        for start, end in ((0, 5), (5, 6), (6, 7), (7, S)):
            part = place.constrain(jnp.asarray(new[:, start:end]), attend.KEY)
            kept = write(kept, part, start)
        read = cache.read_slots(kept, jnp.float32)
        if "sequence" in mesh:
            assert kept.codes.addressable_shards[0].data.shape == (B, S // 2, K // 2, H)
            assert kept.scale.addressable_shards[0].data.shape == (B, S // 2, K // 2)
    codes, scale = numpy_rounded(new)
    assert np.abs(np.asarray(kept.codes, np.int32) - codes).max() <= 1  # in the middle of two
    assert (np.asarray(kept.codes) == codes).mean() > 0.99
    np.testing.assert_allclose(kept.scale, scale, rtol=1e-6)
    np.testing.assert_array_equal(read[0, 3], 0)
    assert (np.abs(read - new) <= scale[..., None] * 0.501).all()


def test_attention_to_the_cache_is_that_of_numpy():
    place, random = place_of(), np.random.default_rng(1)
    query, key, value = (random.normal(size=(B, S, heads, H)) for heads in (N, K, K))
    query = query[:, -1:].astype(np.float32)
    of_slots = np.zeros((B, S), np.int32), np.tile(np.arange(S, dtype=np.int32), (B, 1))
    mask = Mask(np.zeros((B, 1), np.int32), np.full((B, 1), S - 1, np.int32), *of_slots)
    window = 7
    with jax.set_mesh(place.mesh):

        def ours(query, key, value):
            arrays = []
            for new in (key, value):
                kept = cache.empty_slots(
                    cache.CACHE[1:], new.shape, kind=cache.INT8, dtype=new.dtype, place=place
                )
                kept = cache.write_slots(kept, new, 0, place=place)
                arrays.append(cache.read_slots(kept, new.dtype))
            return attend.attend(
                query, *arrays, jax.tree.map(jnp.asarray, mask), Scores(0.3, 0.0, window),
                config=attend.AttentionConfig(), place=place, keys="cache",
            )  # fmt: skip

        got = jax.jit(ours)(query, np.float32(key), np.float32(value))
    key, value = (
        np.float64(codes) * scale[..., None] for codes, scale in map(numpy_rounded, (key, value))
    )
    key, value = (np.repeat(array, N // K, axis=2) for array in (key, value))
    scores = 0.3 * np.einsum("bnh,bsnh->bns", query[:, 0].astype(np.float64), key)
    scores[..., : S - window] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    wanted = np.einsum("bns,bsnh->bnh", weights, value)
    np.testing.assert_allclose(np.asarray(got)[:, 0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_close_to_those_of_a_whole_cache(family):
    """Windows, sinks, latents, learned positions: as the prompt is read, and token by token."""
    found = {}
    random = np.random.default_rng(1)
    tokens = random.integers(0, VOCAB, (2, 12)).astype(np.int32)
    segments, positions = np.zeros_like(tokens), np.tile(np.arange(12, dtype=np.int32), (2, 1))
    for name, decoder in (("whole", built(family)), ("int8", in_int8(built(family)))):
        apply, execution = decoder.apply, decoder.execution
        with jax.set_mesh(execution.place.mesh):
            kept = apply.empty_cache(2, 14, execution)
            decode = jax.jit(lambda *arrays: apply.decode(*arrays, execution))  # noqa: B023
            logits = []
            for at in (slice(0, 10), slice(10, 11), slice(11, 12)):
                rows = (tokens[:, at], segments[:, at], positions[:, at])
                out, kept = decode(decoder.params, kept, *rows, at.start)
                logits.append(np.asarray(out)[..., :VOCAB])
        found[name] = np.concatenate(logits, axis=1)
        of_token = sum(leaf.nbytes for leaf in jax.tree.leaves(kept["blocks"])) / (2 * 14)
        if "first" in kept:
            of_token += sum(leaf.nbytes for leaf in jax.tree.leaves(kept["first"])) / (2 * 14)
        assert of_token == cache.bytes_per_token(
            decoder.config, execution.kv_cache, jnp.dtype("float32")
        )
    error = np.abs(found["int8"] - found["whole"]).max() / found["whole"].std()
    assert 0 < error < LOGITS, error


@pytest.mark.parametrize(
    "mesh", [(("fsdp", 2), ("tensor", 2)), (("sequence", 2), ("data", 2))], ids=str
)
def test_no_mesh_and_no_other_row_changes_a_text(mesh):
    decoder = in_int8(built("llama3"))
    wanted = decoder.generate(PROMPTS)
    assert in_int8(built("llama3", mesh)).generate(PROMPTS) == wanted
    assert [decoder.generate([prompt])[0] for prompt in PROMPTS[:2]] == wanted[:2]
