"""The products of a layer: shapes and logical axes of their arrays."""

BATCH = ("batch", "sequence")


def table(*, B: int, T: int, D: int, N: int, H: int, F: int) -> dict[str, tuple]:
    """By expression: shape and axes of x, of the weight, and axes of the result."""
    return {
        "BTD,DNH->BTNH": (
            ((B, T, D), (*BATCH, "embed")),
            ((D, N, H), ("embed", "heads", "head_dim")),
            (*BATCH, "heads", "head_dim"),
        ),
        "BTNH,NHD->BTD": (
            ((B, T, N, H), (*BATCH, "heads", "head_dim")),
            ((N, H, D), ("heads", "head_dim", "embed")),
            ("batch", "block_sequence", "embed"),
        ),
        "BTF,FD->BTD": (
            ((B, T, F), (*BATCH, "mlp")),
            ((F, D), ("mlp", "embed")),
            ("batch", "block_sequence", "embed"),
        ),
    }
