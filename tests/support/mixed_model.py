"""One model with every variation of a block that no family has together."""

from llmx.model.families import GLOBAL, LOCAL_NOPE

# Rotated layers and local ones that are not, heads rotated in part, biases of queries, keys and
# values; norms behind attention and MLP alone.
MIXED = dict(
    layer_pattern=(GLOBAL, LOCAL_NOPE), window=5, rope_dim=4, qkv_bias=True, pre_norms=False,
    post_norms=True,
)  # fmt: skip
