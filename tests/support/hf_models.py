"""Small random models of transformers, and what llmx and transformers compute of them.

The models are made here; nothing is downloaded.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from llmx.checkpoint import hf, hf_reader
from llmx.model import apply, execution, families

# Gradients of a mean loss, relative to the largest of each tensor.
GRADIENTS = 1e-4

LENGTH = 48
TINY = {
    "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
SLIDING, FULL = "sliding_attention", "full_attention"


def make(transformers, name: str, values: dict, directory: pathlib.Path):
    """A model of transformers by the class and values of its config, saved in `directory`."""
    import torch

    config = getattr(transformers, name)(**values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # else the weights depend on which tests ran before
        theirs = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # Weights that make every part matter: random norms and biases, uneven attention.
        for parameter in theirs.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.15 if parameter.ndim > 1 else 0.3))
        for name, buffer in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn(buffer.shape, generator=generator))
    theirs.save_pretrained(directory)
    return theirs


def tokens_of(length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 99, (2, length)).astype(np.int32)


def our_apply(config: families.ModelConfig, params: dict, run: execution.Execution):
    """The decoder's functions, and its parameters on the mesh."""
    shapes, _ = apply.abstract_parameters(config)
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, params)
    whole = jax.sharding.NamedSharding(run.place.mesh, jax.sharding.PartitionSpec())
    return apply.Apply(config), jax.device_put(params, whole)


def our_logits(config, params, run, tokens: np.ndarray) -> np.ndarray:
    apply, params = our_apply(config, params, run)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)

    def logits(params, tokens, segments, positions):
        return apply.logits(params, tokens, segments, positions, run)

    with jax.set_mesh(run.place.mesh):
        return np.asarray(jax.jit(logits)(params, tokens, np.zeros_like(tokens), positions))


def their_logits(theirs, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return theirs(torch.from_numpy(tokens).long()).logits.numpy()


def assert_same_gradients(theirs, directory: pathlib.Path, run, tmp_path: pathlib.Path):
    """Of every tensor of the checkpoint in `directory`."""
    import torch

    config, params = hf.load(directory)
    apply, params = our_apply(config, params, run)
    tokens, targets = tokens_of(), np.roll(tokens_of(), -1, axis=1)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    batch = {
        "tokens": tokens, "targets": targets, "positions": positions,
        "segment_ids": np.zeros_like(tokens),
    }  # fmt: skip

    def loss(params, batch):
        return jnp.mean(apply.losses(params, batch, run)[0])

    with jax.set_mesh(run.place.mesh):
        ours, gradients = jax.jit(jax.value_and_grad(loss))(params, batch)
    theirs.zero_grad()
    logits = theirs(torch.from_numpy(tokens).long()).logits
    flat = torch.from_numpy(targets).long().reshape(-1)
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 99), flat)
    expected.backward()
    np.testing.assert_allclose(float(ours), expected.item(), rtol=1e-5)
    # Gradients have the shapes of parameters, so the same map names them.
    hf.export(gradients, config, tmp_path / "gradients")
    mapped = safetensors.numpy.load_file(tmp_path / "gradients" / hf_reader.WEIGHTS)
    parameters = dict(theirs.named_parameters())
    assert parameters.keys() == mapped.keys()
    for name, parameter in parameters.items():
        gradient = parameter.grad.numpy()
        scale = np.abs(gradient).max()
        assert scale > 0, name
        np.testing.assert_allclose(mapped[name], gradient, atol=GRADIENTS * scale, err_msg=name)
