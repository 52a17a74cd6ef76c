"""Keys and values in int8: the codes are NumPy's, and what is generated is the same on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model.test_sampling import PROMPTS, VOCAB, built

from llmx.model import apply, sampling
from llmx.model.attention import attend, cache
from llmx.model.attention.masks import Mask, Scores

# Of the deviation of logits: sums in another order, of the same codes.
SAME = 1e-3
# The root mean square of what int8 changes, of random weights, whose scores are large.
OF_LATENTS = 0.05
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
        read = np.asarray(cache.read_slots(kept, jnp.float32))
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


def cached_logits(decoder, tokens):
    """Of a prompt that is read at once, and of two more tokens; and the cache."""
    positions = np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1))
    apply, execution, segments = decoder.apply, decoder.execution, np.zeros_like(tokens)
    with jax.set_mesh(execution.place.mesh):
        kept, logits = apply.empty_cache(len(tokens), tokens.shape[1] + 2, execution), []
        decode = jax.jit(lambda *arrays: apply.decode(*arrays, execution))
        for at in (slice(0, 10), slice(10, 11), slice(11, 12)):
            rows = (tokens[:, at], segments[:, at], positions[:, at])
            out, kept = decode(decoder.params, kept, *rows, at.start)
            logits.append(np.asarray(out)[..., :VOCAB])
    return np.concatenate(logits, axis=1), kept


def tokens_of():
    return np.random.default_rng(1).integers(0, VOCAB, (2, 12)).astype(np.int32)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_logits_are_those_of_rounded_keys_and_values(family, monkeypatch):
    """Windows, norms of keys, sinks; against a pass without a cache, whose keys and values are
    rounded as NumPy does it."""
    decoder, tokens = built(family), tokens_of()
    cached, _ = cached_logits(in_int8(decoder), tokens)
    of_float, _ = cached_logits(decoder, tokens)

    def numpy_attend(query, key, value, *arguments, **settings):
        def rounded(array):
            codes, scale = numpy_rounded(array)
            return codes * scale[..., None]

        key, value = (
            jax.pure_callback(rounded, jax.ShapeDtypeStruct(array.shape, array.dtype), array)
            for array in (key, value)
        )
        return attend_to(query, key, value, *arguments, **settings)

    attend_to = attend.attend
    monkeypatch.setattr(attend, "attend", numpy_attend)
    positions = np.tile(np.arange(12, dtype=np.int32), (2, 1))
    with jax.set_mesh(decoder.execution.place.mesh):
        wanted = decoder.apply.logits(
            decoder.params, tokens, np.zeros_like(tokens), positions, decoder.execution
        )
    wanted = np.asarray(wanted)[..., :VOCAB]
    error = np.abs(cached - wanted).max() / wanted.std()
    assert error < SAME, error
    assert np.abs(cached - of_float).max() / wanted.std() > 10 * SAME


def test_latents_in_int8_change_logits_little():
    decoder, tokens = built("deepseek_v3"), tokens_of()
    cached, kept = cached_logits(in_int8(decoder), tokens)
    wanted, of_float = cached_logits(decoder, tokens)
    assert 0 < np.sqrt(np.square(cached - wanted).mean()) / wanted.std() < OF_LATENTS
    for kind, slots in ((cache.INT8, kept), ("", of_float)):
        found = sum(leaf.nbytes for leaf in jax.tree.leaves((slots["blocks"], slots["first"])))
        assert found == 2 * 14 * cache.bytes_per_token(decoder.config, kind, jnp.dtype("float32"))


@pytest.mark.parametrize("mesh", [(), (("tensor", 2), ("fsdp", 2))], ids=str)
def test_a_layer_that_repeats_has_a_cache_for_each_time(mesh):
    """Logits and cache are those of a model that has its layers as often as they are used."""
    decoder, tokens = built("llama3", mesh), tokens_of()
    model = dataclasses.replace(decoder.config, repeats=3)
    place = sampling.placement(decoder.execution.place, split_batch=True)
    execution = dataclasses.replace(decoder.execution, place=place)
    thrice = dataclasses.replace(
        decoder, config=model, apply=apply.Apply(model), execution=execution
    )  # fmt: skip
    unrolled = dataclasses.replace(model, repeats=1, num_layers=3 * model.num_layers)
    plain = built("llama3")
    blocks = jax.tree.map(lambda leaf: np.repeat(leaf, 3, axis=0), plain.params["blocks"])
    plain = dataclasses.replace(
        plain,
        config=unrolled,
        apply=apply.Apply(unrolled),
        params=plain.params | dict(blocks=blocks),
    )
    for kind in cache.FORMATS:
        of = in_int8 if kind else lambda decoder: decoder
        logits, kept = cached_logits(of(thrice), tokens)
        wanted, of_plain = cached_logits(of(plain), tokens)
        assert np.abs(logits - wanted).max() / wanted.std() < SAME
        shapes = [jax.tree.map(jnp.shape, each["blocks"]) for each in (kept, of_plain)]
        assert shapes[0] == shapes[1]
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(kept["blocks"]))
        assert size == 2 * 14 * cache.bytes_per_token(model, kind, jnp.dtype("float32"))


@pytest.mark.parametrize(
    "mesh", [(("fsdp", 2), ("tensor", 2)), (("sequence", 2), ("data", 2))], ids=str
)
def test_no_mesh_and_no_other_row_changes_a_text(mesh):
    decoder = in_int8(built("llama3"))
    wanted = decoder.generate(PROMPTS)
    assert in_int8(built("llama3", mesh)).generate(PROMPTS) == wanted
    assert [decoder.generate([prompt])[0] for prompt in PROMPTS[:2]] == wanted[:2]
