"""Hugging Face checkpoints of small random models, made by llmx."""

import jax
import numpy as np

from llmx.checkpoint import hf_formats
from llmx.model import apply, families
from llmx.sharding import trees

SMALL = dict(vocab_size=259, width=32, num_heads=4, num_layers=4, vocab_multiple=32)
# Fused tensors, tied head; latent attention with first layers; experts in one tensor, biases; parts
# of different sizes behind one another.
FAMILIES = {
    "gpt2": dict(head_dim=8, mlp_dim=64, num_kv_heads=4, max_positions=32),
    "llama3": dict(num_kv_heads=2, head_dim=8, mlp_dim=48),
    "deepseek_v3": dict(num_kv_heads=4, head_dim=24, mlp_dim=48, expert_dim=16, shared_dim=16),
    "gpt_oss": dict(num_kv_heads=2, head_dim=8, expert_dim=16),
    "phi3": dict(num_kv_heads=2, head_dim=8, mlp_dim=48),
}


def random_params(family: str, **values) -> tuple[families.ModelConfig, dict]:
    """fp32, zeros where files have nothing; `values`: other ones of the model."""
    model = families.preset(family, **SMALL | FAMILIES[family] | values)
    return model, params_of(model)


def params_of(model: families.ModelConfig) -> dict:
    """The same of any model."""
    shapes, _ = apply.abstract_parameters(model)
    noise = np.random.default_rng(0)

    def draw(path, leaf):
        name = trees.path_name(path)
        array = noise.normal(size=leaf.shape).astype(np.float32)
        if name in ("embedding", "head"):
            array[model.vocab_size :] = 0
        return array * (name not in hf_formats.unwritten(model))

    return jax.tree_util.tree_map_with_path(draw, shapes)
