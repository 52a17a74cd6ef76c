"""A Llama of 0.8M parameters learns to answer the questions of a small file of conversations.

    python -m llmx.train --config configs/quickstart_chat.py
    python -m llmx.generate --workdir runs/quickstart_chat --chat --temperature 0
    python -m llmx.data --preview --source configs/quickstart_chat.jsonl --format chat \
        --chat-template configs/quickstart_chat.jinja
    python -m llmx.aot --config configs/quickstart_chat.py --topology v5e:1x1

After about two minutes on two CPU cores it knows the answers by heart. An imported model brings
its own config, tokenizer and chat template, and is trained on conversations by

    python -m llmx.train --config runs/qwen3/config.json --workdir runs/tuned \
        --config.start_from=runs/qwen3 --config.data.format=chat \
        --config.data.sources="('chats.jsonl',)" --config.optimizer.learning_rate=1e-5
"""

import pathlib

from llmx import config
from llmx.model import families

HERE = pathlib.Path(__file__).parent


def get_config() -> config.Config:
    run = config.default()
    run.steps, run.precision = 150, "fp32"
    run.model = families.preset(
        "llama3", width=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=384,
        max_positions=1024, vocab_multiple=8, tied_head=True,
    )  # fmt: skip
    run.batch.size, run.batch.sequence_length, run.data.pack = 8, 384, False
    run.data.sources, run.data.format = (str(HERE / "quickstart_chat.jsonl"),), "chat"
    run.data.chat_template, run.data.held_out = str(HERE / "quickstart_chat.jinja"), 0.0
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 5e-3, 20
    run.checkpoint.every, run.metrics.log_every = 50, 10
    return run
