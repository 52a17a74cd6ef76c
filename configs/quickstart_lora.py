"""Fine-tunes the model of the quickstart on conversations, by adapters: 4% of its parameters.

    python -m llmx.train --config configs/quickstart.py           # first: the model
    python -m llmx.train --config configs/quickstart_lora.py
    python -m llmx.generate --workdir runs/quickstart_lora --chat --temperature 0
    python -m llmx.convert --workdir runs/quickstart_lora --to-hf exported/       # merged
    python -m llmx.convert --workdir runs/quickstart_lora --to-peft adapter/      # beside the base
    python -m llmx.aot --config configs/quickstart_lora.py --topology v5e:1x1

A Llama of Hugging Face is fine-tuned by the same lines with `start_from` its directory, which
brings the model and the tokenizer, and without `chat_template`, which the tokenizer has.
"""

import pathlib

from llmx import config

HERE = pathlib.Path(__file__).parent


def get_config() -> config.Config:
    run = config.default()
    run.start_from = "runs/quickstart"
    run.adapters.rank, run.adapters.alpha = 8, 16.0
    run.steps, run.precision = 150, "fp32"
    run.batch.size, run.batch.sequence_length, run.data.pack = 8, 256, False
    run.data.sources, run.data.format = (str(HERE / "quickstart_chat.jsonl"),), "chat"
    run.data.chat_template, run.data.held_out = str(HERE / "quickstart_chat.jinja"), 0.0
    run.optimizer.learning_rate, run.optimizer.warmup_steps = 5e-3, 20
    run.checkpoint.every, run.metrics.log_every = 50, 10
    return run
