"""The quickstart's model with products of low rank, trained further.

    python -m llmx.train --config configs/quickstart.py
    python -m llmx.compress --workdir runs/quickstart --recipe configs/compress_quickstart.py \
        --output runs/quickstart_small

A few minutes on two CPU cores; runs/quickstart_small/compress.png shows size, loss and speed after
each stage. If killed, rerun the command; it continues.
"""

from llmx.compress.recipe import Recipe


def get_recipe() -> Recipe:
    return Recipe(
        stages=(
            ("low_rank", dict(share=0.5, method="whitened")),
            ("train", dict(steps=150, learning_rate=2e-3, warmup_steps=10)),
        ),
    )
