"""Every key has an effect: another value changes the step, the data or what the host does.

Where it needs other keys for that, it is refused without them.
"""

import inspect
import json
import pathlib
import re
import socket
import tempfile

import jax.numpy as jnp
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from support import host_keys as host
from support import small_tokenizers
from support import traced_keys as traced

from llmx import config as config_lib
from llmx.data import build, shards, tokenizers
from llmx.model import losses, own
from llmx.pipeline import schedule, schedules

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
KEYS = config_lib.leaf_types(config_lib.Config)
with socket.socket() as _free:
    _free.bind(("127.0.0.1", 0))
    PORT = str(_free.getsockname()[1])

# A model of one matrix, whose steps are traced in no time.
OWN = {"model.own": "object:matrix"}
own.MODELS[OWN["model.own"]] = own.Functions(
    init=lambda key: {"table": jnp.zeros((320, 8))},
    logits=lambda params, tokens_BT, *_: params["table"][tokens_BT] @ params["table"].T,
)
TWO = {"mesh.data": 2}
ROPE = {"model.rope_factor": 4.0, "model.rope_old_context": 256}
LLAMA, YARN = ({"model.rope_scaling": name} for name in ("llama3", "yarn"))
MOE, LATENT = {"model": "mixtral"}, {"model": "deepseek_v3"}
DYNAMIC = {"loss_scale.kind": "dynamic"}
SKIP = {"guard.on_bad_step": "skip"}
DEFAULT_MODEL = {"model.num_layers": 4, "model.width": 256, "model.vocab_multiple": 128}
CLICKS = {
    "data.format": "records", "data.sources": ("FOLDER/clicks.parquet",),
    "model.recommender.name": "dlrm", "model.recommender.bottom": (8, 4),
    "model.recommender.top": (8,), "model.recommender.width": 4, "data.records.rows": 50,
    "batch.sequence_length": 1, "data.records.dense": ("I1", "I2"),
    "data.records.features": ("C1", "C2"), **DEFAULT_MODEL,
}  # fmt: skip
HISTORY = {
    "data.records.features": ("C1", "H:3@C1", "C2@C1"), "model.recommender.histories": ("H=C1",),
}  # fmt: skip
NGRAMS = {"model.ngram_tables": (2,)}
STAGES = {"mesh.stage": 2, "batch.accumulation": 4, "model.num_layers": 8}
TEACHER = {"distillation.teacher": "FOLDER/run"}
PAIRS = {
    "data.format": "preference", "data.sources": (str(CONFIGS / "quickstart_dpo.jsonl"),),
    "data.chat_template": str(CONFIGS / "quickstart_chat.jinja"), "data.held_out": 0.0,
    "batch.sequence_length": 256, "data.pack": False, "batch.size": 2,
}  # fmt: skip
CHAT = PAIRS | {
    "data.format": "chat", "data.sources": (str(CONFIGS / "quickstart_chat.jsonl"),)
}  # fmt: skip
TEXT = {"data.sources": ("FOLDER/a.jsonl", "FOLDER/b.jsonl")}
PRUNED = {"pruning.method": "magnitude"}
START = {"start_from": "FOLDER/run", "data.tokenizer": "bytes"}
GROUPS = {"sync.groups": 3, "sync.exchange": "FOLDER/run"}
MEETING = {
    "launch.coordinator": "127.0.0.1:PORT", "launch.num_processes": 2, "launch.process_id": 0,
}  # fmt: skip


def sync(name, **keys):
    return {"sync.strategy": name} | {f"sync.{key}": value for key, value in keys.items()}


# What shows it; a run that is small and has what is looked at; what keys need to have an effect,
# without which they are refused; and another value of each.
WALK = [
    (traced.shapes, {}, {}, {
        "model.width": 128, "model.num_layers": 3, "model.num_heads": 8, "model.num_kv_heads": 2,
        "model.head_dim": 32, "model.mlp_dim": 512, "model.vocab_size": 500,
        "model.vocab_multiple": 128, "model.positions": "learned", "model.norm": "layer",
        "model.post_norms": True, "model.qk_norm": True,
        "model.gated_mlp": False, "model.bias": True,
        "model.qkv_bias": True, "model.tied_head": True, "model.attention_sinks": True,
        "model.ranks": ("mlp=8",), "model.embedding_rank": 4, "model.ngram_tables": (2,),
        "model.own": "object:matrix", "batch.size": 8, "batch.sequence_length": 32,
        "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "mesh.expert": 2,
        "mesh.sequence": 2, "optimizer.name": "lion", "optimizer.moments": "int8",
        "optimizer.ema_decay": 0.9, "offload.optimizer": True,
        "adapters.rank": 4, "packed.format": "int8", "loss_scale.kind": "fixed",
        "pruning.method": "magnitude",
    }),
    (traced.shapes, {"model.num_layers": 4}, {}, {"mesh.stage": 2}),
    (traced.shapes, {"mesh.fsdp": 2, "mesh.data": 2}, {}, {
        "sharding.layout": "ddp",
    }),
    (traced.shapes, MOE, {}, {"model.num_experts": 4}),
    (traced.shapes, {}, MOE, {
        "model.expert_dim": 24, "model.shared_dim": 24, "model.first_dense": 1,
    }),
    (traced.a_step, {}, MOE, {"experts.bias_rate": 0.1}),
    (traced.shapes, {"remat": "full"}, {}, {"offload.parameters": True}),
    (traced.shapes, LATENT, {}, {"model.kv_latent": 16}),
    (traced.shapes, {"model.post_norms": True}, {}, {"model.pre_norms": False}),
    (traced.shapes, {}, LATENT, {
        "model.query_latent": 12, "model.value_dim": 8,
    }),
    (traced.shapes, {"model.positions": "learned"}, {}, {"model.max_positions": 64}),
    (traced.shapes, {}, {"model.embedding_rank": 4}, {"model.embedding_cores": 2}),
    (traced.shapes, {}, {"adapters.rank": 4}, {"adapters.products": ("mlp",)}),
    (traced.shapes, {}, {"packed.format": "int8"}, {
        "packed.group": 32, "packed.symmetric": False,
    }),
    (traced.shapes, {}, {"quantization.bits": 4}, {"quantization.scales": "learned"}),
    (traced.shapes, {}, PRUNED, {"pruning.products": ("mlp",), "pruning.rewind_to": 5}),
    (traced.shapes, {}, {"products.format": "fp8"}, {"products.scaling": "delayed"}),
    (traced.shapes, {}, {"products.format": "fp8", "products.scaling": "delayed"}, {
        "products.history": 4,
    }),
    (traced.shapes, PAIRS, {}, {"preference.loss": "none"}),
    (traced.shapes, {}, {}, {"distillation.teacher": "FOLDER/run", "distillation.top_k": 4}),
    (traced.shapes, {}, NGRAMS, {
        "model.ngram_rows": 128, "tables.optimizer": "adam", "tables.staleness": 1,
        "tables.cache_rows": 1000,
    }),
    (traced.shapes, TWO | {"tables.optimizer": "adagrad"}, NGRAMS, {"tables.split": "columns"}),
    (traced.shapes, {}, CLICKS, {
        "data.records.rows": 80, "data.records.features": ("C1",), "data.records.dense": ("I1",),
    }),
    (traced.shapes, {}, CLICKS, {
        "model.recommender.top": (6,),
        "model.recommender.bottom": (6, 4),
    }),
    (traced.shapes, {}, CLICKS | {"model.recommender.name": "dcn"}, {
        "model.recommender.width": 8,
        "model.recommender.cross_layers": 2, "model.recommender.cross_rank": 2,
        "model.recommender.structure": "parallel",
    }),
    (traced.a_step, {}, CLICKS | HISTORY | {"model.recommender.name": "din"}, {
        "model.recommender.histories": ("H=C2",),
    }),
    (traced.shapes, {}, CLICKS | HISTORY | {"model.recommender.name": "din"}, {
        "model.recommender.attention": (7,),
    }),
    (traced.shapes, CLICKS, {}, {"model.recommender.name": "dcn"}),
    (traced.loss, {}, {}, {
        "model.norm_eps": 1e-3, "model.norm_plus_one": True, "model.activation": "gelu",
        "model.embedding_scale": True, "model.query_scale": 0.1,
        "model.layer_pattern": ("global_nope",), "model.attention_softcap": 5.0,
        "model.logit_softcap": 5.0, "model.repeats": 2, "loss.chunks": 2,
        "attention.implementation": "blockwise", "products.format": "fp8",
        "quantization.activations": "current", "precision": "fp32", "loss.z_loss": 0.1,
        "loss.of_tokens": "other",
    }),
    (traced.loss, {}, {}, {
        "model.rope_theta": 500.0, "model.rope_interleaved": True, "model.rope_dim": 8,
    }),
    (traced.loss, ROPE | YARN, {}, {"model.rope_scaling": "llama3"}),
    (traced.loss, ROPE, LLAMA, {
        "model.rope_factor": 8.0, "model.rope_low_freq": 0.5, "model.rope_high_freq": 8.0,
        "model.rope_old_context": 64,
    }),
    (traced.loss, ROPE, YARN, {
        "model.rope_beta_fast": 3.0, "model.rope_beta_slow": 0.1, "model.rope_truncate": False,
        "model.rope_mscale_all": 0.5,
    }),
    (traced.loss, ROPE, YARN | {"model.rope_mscale_all": 0.7}, {"model.rope_mscale": 3.0}),
    (traced.loss, {}, {"model.qk_norm": True}, {"model.qk_norm_over": "all"}),
    (traced.loss, {}, {"model.layer_pattern": ("local",), "model.window": 4}, {
        "model.window": 3, "model.rope_theta_local": 50.0,
    }),
    (traced.loss, {}, MOE, {
        "model.experts_per_token": 3, "model.router": "sigmoid",
        "model.router_renormalize": False, "model.router_scale": 2.0,
        "experts.balance_weight": 0.3, "experts.z_weight": 0.3, "experts.dispatch": "dense",
        "experts.balance": "batch",
    }),
    (traced.loss, MOE, {"experts.dispatch": "capacity"}, {
        "experts.capacity": 2.0,
    }),
    (traced.loss, MOE, {"mesh.expert": 2}, {"experts.buffer": 0.5}),
    (traced.loss, {}, MOE | {
        "model.router": "sigmoid", "model.router_groups": 4, "model.router_groups_kept": 2}, {
        "model.router_groups": 2, "model.router_groups_kept": 3,
    }),
    (traced.loss, {}, {"mesh.sequence": 2}, {
        "attention.ulysses": 2, "attention.zigzag": False,
    }),
    (traced.loss, {}, {"mesh.tensor": 2}, {"sharding.sequence_parallel": False}),
    (traced.loss, {}, {}, {"sharding.turns": 2}),
    (traced.shapes, {"model.num_kv_heads": 2}, {"mesh.tensor": 2}, {
        "sharding.replicate_kv": True,
    }),
    (traced.loss, {}, {"products.format": "int8"}, {"products.granularity": "channel"}),
    (traced.loss, {}, {
        "products.format": "fp8", "products.granularity": "block", "products.block": 32}, {
        "products.block": 16,
    }),
    (traced.loss, {"mesh.fsdp": 2}, {}, {"products.gather": "fp8"}),
    (traced.loss, {}, {"adapters.rank": 4}, {"adapters.alpha": 2.0, "adapters.dropout": 0.1}),
    (traced.loss, PAIRS, {"data.format": "preference"}, {
        "preference.beta": 0.3, "preference.label_smoothing": 0.1, "preference.chosen_weight": 0.1,
    }),
    (traced.loss, {}, TEACHER, {
        "distillation.weight": 0.3, "distillation.temperature": 2.0,
        "distillation.divergence": "reverse", "distillation.hidden_weight": 0.1,
        "distillation.attention_weight": 0.1,
    }),
    (traced.loss, {}, TEACHER | {"distillation.hidden_weight": 0.1}, {
        "distillation.hidden_loss": "cosine", "distillation.hidden_layers": (0, -1),
    }),
    (traced.loss, {}, TEACHER | {"distillation.attention_weight": 0.1}, {
        "distillation.attention_relations": ("qq",), "distillation.attention_heads": 2,
        "distillation.attention_layers": (0, -1),
    }),
    (traced.a_step, {}, CLICKS | HISTORY | {"model.recommender.histories": ()}, {
        "tables.combine": "max",
    }),
    (traced.a_step, TWO, CLICKS, {"tables.capacity": 3.0}),
    (traced.shapes, {}, NGRAMS, {"tables.weight_decay": 0.1}),
    (traced.new_tables, {}, NGRAMS, {"tables.scale": 0.5, "tables.initial_square": 0.5}),
    (traced.a_step, OWN, {}, {
        "optimizer.learning_rate": 0.1, "optimizer.schedule": "linear",
        "optimizer.warmup_steps": 3, "optimizer.weight_decay": 0.3, "optimizer.clip_norm": 0.3,
        "guard.on_bad_step": "skip", "guard.spike_factor": 3.0,
        "batch.accumulation": 2,
    }),
    (traced.a_step, OWN, {}, {
        "optimizer.b1": 0.5, "optimizer.b2": 0.5, "optimizer.eps": 1e-3,
    }),
    (traced.a_step, OWN, {}, {"optimizer.final_fraction": 0.5}),
    (traced.rates, OWN | {"optimizer.warmup_steps": 1}, {}, {"steps": 30}),
    (traced.rates, OWN | {"optimizer.warmup_steps": 1}, {"optimizer.schedule": "wsd"}, {
        "optimizer.decay_steps": 9,
    }),
    (traced.a_step, OWN, SKIP, {"guard.patience": 3}),
    (traced.new_scale, OWN, DYNAMIC, {"loss_scale.initial": 4.0}),
    (traced.a_step, OWN, DYNAMIC, {
        "loss_scale.growth_interval": 7, "loss_scale.growth_factor": 4.0,
        "loss_scale.backoff_factor": 0.25, "loss_scale.minimum": 2.0, "loss_scale.maximum": 2.0**20,
    }),
    (traced.a_step, {"mesh.fsdp": 2}, {}, {
        "remat": "full", "reduce_dtype": "fp32", "sharding.gather": "step",
    }),
    (traced.a_step, {"remat": "names"}, {}, {"offload.saves": ("attention",)}),
    (traced.a_step, {}, {}, {"quantization.bits": 4}),
    (traced.a_step, {}, {"quantization.bits": 4}, {"quantization.group": 32}),
    (traced.a_step, {}, {"quantization.activations": "average"}, {
        "quantization.decay": 0.5, "quantization.freeze_after": 3,
    }),
    (traced.a_step, {}, CLICKS, {
        "tables.learning_rate": 0.3, "tables.eps": 1e-3,
    }),
    (traced.a_step, CLICKS, {"tables.optimizer": "adam"}, {
        "tables.b1": 0.3, "tables.b2": 0.3,
    }),
    (traced.a_step, CLICKS, {"tables.optimizer": "ftrl"}, {
        "tables.l1": 0.3, "tables.l2": 0.3,
    }),
    (traced.a_step, TWO, {}, {"sync.strategy": "int8"}),
    (traced.a_step, TWO, sync("int8"), {
        "sync.error_feedback": False, "sync.bucket_mib": 1e-3, "sync.uncompressed": ("*norm*",),
    }),
    (traced.between, TWO, sync("int8"), {"sync.warmup_steps": 2}),
    (traced.a_step, TWO, sync("one_bit", warmup_steps=2), {"sync.scale": "mean"}),
    (traced.shapes, TWO, sync("power_sgd"), {"sync.rank": 2}),
    (traced.a_step, TWO, sync("top_k"), {"sync.fraction": 0.3}),
    (traced.a_step, TWO | {"optimizer.b1": 0.0}, sync("top_k"), {"sync.momentum": 0.5}),
    (traced.between, TWO, sync("top_k"), {"sync.ramp_steps": 8}),
    (traced.between, TWO, sync("local_sgd", every=3), {
        "sync.average_moments": True, "sync.by_tokens": True, "sync.outer_format": "int8",
        "sync.every": 5,
    }),
    (traced.between, TWO, sync("diloco", every=4), {
        "sync.outer_learning_rate": 0.2, "sync.outer_momentum": 0.2, "sync.fragments": 2,
        "sync.overlap": True,
    }),
    (traced.shapes, TWO, sync("stale"), {"sync.staleness": 1}),
    (traced.a_step, TWO, sync("stale"), {"sync.asynchronous": True}),
    (traced.between, {}, PRUNED, {
        "pruning.scope": "layer", "pruning.sparsity": 0.3, "pruning.begin_step": 5,
        "pruning.end_step": 18, "pruning.every": 3,
    }),
    (traced.between, {}, {"pruning.method": "n_m"}, {"pruning.pattern": "1:4"}),
    (host.masked, {}, {"pruning.method": "fixed", "pruning.masks_from": "FOLDER/run"}, {
        "pruning.masks_from": "FOLDER/none",
    }),
    (traced.staged, {}, STAGES, {
        "pipeline.schedule": "gpipe", "pipeline.layers": (3, 5),
        "pipeline.table": "FOLDER/table.csv",
    }),
    (traced.staged, {}, STAGES | {"pipeline.schedule": "interleaved_1f1b"}, {
        "pipeline.virtual_stages": 4,
    }),
    (traced.staged, {}, STAGES | {"pipeline.schedule": "zb_1f1b"}, {"pipeline.memory_gib": 1.0}),
    (traced.shapes, {}, STAGES | {"pipeline.schedule": "pipedream_2bw"}, {
        "pipeline.predict": True,
    }),
    (traced.kept_tokens, {}, {}, {"sample.kv_cache": "int8"}),
    (traced.rolled_back, {"rollback.at": (3,), "rollback.skipped": (1,)}, {}, {
        "rollback.at": (5,), "rollback.skipped": (2,), "rollback.at_most": 3,
        "rollback.rise": 2.0,
    }),
    (traced.rolled_back, {"rollback.at": (3,), "rollback.skipped": (1,)},
     {"rollback.at_most": 2}, {"rollback.rate_factor": 0.3}),
    (traced.rolled_back, {}, {}, {"rollback.window": 20}),
    (traced.data, TEXT, {}, {
        "data.sources": ("FOLDER/a.jsonl",), "data.tokenizer": "FOLDER/tokenizer.json",
        "data.train_tokenizer": 300, "data.held_out": 0.3,
        "data.shuffle": False, "seed": 1,
    }),
    (traced.data, TEXT, {}, {"data.weights": (0.9, 0.1)}),
    (traced.data, TEXT, {}, {"data.text_key": "other", "data.pack": False}),
    (traced.data, TEXT | {"data.tokenizer": "FOLDER/tokenizer.json"}, {}, {"data.bos": False}),
    (traced.data, {"data.sources": ("FOLDER/bad.jsonl",)}, {}, {"data.skip_bad": True}),
    (traced.data, {"data.sources": ("shards:FOLDER/flipped",)}, {}, {"data.verify": True}),
    (traced.data, TEXT, {}, {"data.prefetch": 2, "data.num_threads": 2}),
    (traced.data, CHAT | {"data.format": "text", "data.chat_template": ""}, {}, {
        "data.format": "preference",
    }),
    (traced.data, CHAT, {"data.format": "chat"}, {"data.chat_template": "FOLDER/chat.jinja"}),
    (traced.data, {}, CLICKS, {
        "data.records.label": "other", "data.records.ids": "double",
    }),
    (host.of_host, NGRAMS, {"tables.cache_rows": 1000}, {
        "tables.host_gib": 2.0, "tables.admit_after": 2,
    }),
    (host.cached_in, TEXT, {}, {"data.cache_dir": "FOLDER/elsewhere"}),
    (host.saved, {}, {}, {"workdir": "other"}),
    (host.begun, {}, {}, {"start_from": "FOLDER/run", "resume_step": 5}),
    (host.budget, {}, {"remat": "budget", "memory_budget": 2.0}, {"memory_budget": 1.0}),
    (host.begun, DEFAULT_MODEL, START, {"start_from_layers": (0,)}),
    (host.begun, START | {"model.norm_eps": 1e-3}, {"start_from": "FOLDER/run"}, {
        "start_changes": ("norm_eps",),
    }),
    (host.exported, {"model.rope_theta": 10_000.0}, {}, {"model.family": "phi3"}),
    (host.started, {}, {}, {
        "launch.platform": "cpu", "launch.cpu_devices": 3, "launch.coordinator": "auto",
        "launch.compile_cache": "FOLDER/cache",
    }),
    (host.started, MEETING, {}, {
        "launch.coordinator": "127.0.0.2:PORT", "launch.bind_address": "0.0.0.0",
        "launch.join_seconds": 77, "launch.heartbeat_seconds": 77,
    }),
    (host.started, MEETING, {"launch.coordinator": "127.0.0.1:PORT"}, {
        "launch.num_processes": 3, "launch.process_id": 1,
    }),
    (host.compiled, {}, {}, {
        "launch.overlap": "none", "launch.compiler_options": ("xla_cpu_x=1",),
    }),
    (host.placed, {"mesh.data": 4, "mesh.fsdp": 2, "batch.size": 8}, {}, {
        "mesh.across_slices": ("fsdp",),
    }),
    (host.limits, {}, {}, {"watchdog.step_factor": 3.0, "launch.watchdog_seconds": 7}),
    (host.limits, {}, {}, {
        f"watchdog.{name}_seconds": 700.0 for name in (
            "step", "first_step", "backend", "start", "restore", "compile", "evaluation", "save")
    }),
    (host.checkpoints, {}, {}, {
        "checkpoint.every": 100, "checkpoint.keep_last": 2, "checkpoint.keep_every": 500,
        "checkpoint.on_failure": "stop", "checkpoint.on_corruption": "restore",
    }),
    (host.locally, {}, {}, {"checkpoint.local_directory": "FOLDER/run"}),
    (host.locally, {}, {"checkpoint.local_directory": "FOLDER/run"}, {"checkpoint.local_every": 7}),
    (host.ended, {}, {}, {"checkpoint.grace_seconds": 5.0}),
    (host.evaluated, {"batch.sequence_length": 64}, {}, {
        "evaluation.every": 5, "evaluation.batches": 2,
        "evaluation.choices": (str(CONFIGS / "quickstart_choices.jsonl"),),
    }),
    (host.reported, {}, {}, {
        "metrics.log_every": 7, "metrics.tensorboard": False, "metrics.progress": "off",
        "metrics.plot_every": 50, "metrics.spike_deviations": 0.0,
    }),
    (host.sampled, {}, {}, {
        "sample.prompt": "def", "sample.max_tokens": 7, "sample.temperature": 0.3,
        "sample.top_k": 5, "sample.top_p": 0.3,
    }),
    (host.profiled, {}, {}, {"profile.first_step": 3}),
    (host.profiled, {}, {"profile.first_step": 3}, {"profile.num_steps": 2}),
    (host.met, TWO | sync("local_sgd", every=4) | GROUPS, {}, {"sync.groups": 2}),
    (host.met, TWO | sync("local_sgd", every=4) | GROUPS, {"sync.groups": 3}, {
        "sync.group": 1, "sync.exchange": "FOLDER/flipped", "sync.round_seconds": 100.0,
    }),
]  # fmt: skip
# What the data say; another value is refused.
FILLED_IN = {
    "model.recommender.num_dense": 5, "model.recommender.features": ("C9",),
    "model.recommender.lengths": (3,), "model.recommender.num_ids": 7,
    "model.recommender.weights": (3,),
}  # fmt: skip
# Shown by a trace, which takes time.
TRACES = (traced.loss, traced.a_step, traced.between)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What configs name: text, records, shards, a run."""
    made = tmp_path_factory.mktemp("named")
    for name in "ab":
        texts = [{"text": f"{name} word {n} " * 9, "other": f"{n} else " * 9} for n in range(60)]
        (made / f"{name}.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (made / "bad.jsonl").write_text((made / "a.jsonl").read_text() + "\n{\n")
    (made / "chat.jinja").write_text(
        (CONFIGS / "quickstart_chat.jinja").read_text().replace(": ", " says ")
    )
    small_tokenizers.byte_level().save(str(made / "tokenizer.json"))
    ids = np.arange(400)
    columns = {"label": ids % 2, "other": ids % 3 // 2, "I1": ids * 0.1, "I2": ids * 0.2,
               "C1": ids % 50, "C2": ids % 9, "H": [[n % 50, 1] for n in ids]}  # fmt: skip
    parquet.write_table(pyarrow.table(columns), made / "clicks.parquet")
    shards_of = build.make_recipe(
        [str(made / "a.jsonl")], tokenizer=tokenizers.ByteTokenizer(), text_key="text",
        skip_bad=False,
    )  # fmt: skip
    (made / "flipped").mkdir()
    build.write_shards(made / "flipped", shards_of, report=lambda *counts: None)
    [tokens] = (made / "flipped").glob("*.tokens")
    tokens.write_bytes(tokens.read_bytes()[:-1] + b"x")
    run = traced.resolved({"workdir": str(made / "run"), "model.vocab_size": 257})
    config_lib.save_run(run)
    tokenizers.ByteTokenizer().save(made / "run" / "tokenizer.json")
    (made / "run" / "checkpoints" / "3").mkdir(parents=True)
    schedule.write_csv(schedules.gpipe(2, 4), made / "table.csv")
    return made


@pytest.fixture(autouse=True)
def alone(monkeypatch, folder):
    """Nothing is written elsewhere; shards are looked at only where that is asked for."""
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(shards, "VERIFY_BYTES", 0)
    monkeypatch.setitem(losses.OF_TOKENS, "other", lambda loss_BT, log_z_BT: loss_BT**2)


def named(changes, folder):
    """With the names of this test's folder."""

    def one(value):
        if isinstance(value, tuple):
            return tuple(map(one, value))
        if not isinstance(value, str):
            return value
        return value.replace("FOLDER", str(folder)).replace("PORT", PORT)

    return {key: one(value) for key, value in changes.items()}


def test_all_keys_are_walked():
    listed = {key for *_, keys in WALK for key in keys} | FILLED_IN.keys()
    assert listed == set(KEYS)


def shown(show, tmp_path, folder, *changes):
    """What a config shows, with a new folder where it writes."""
    run = traced.resolved(*(named(each, folder) for each in changes))
    if len(inspect.signature(show).parameters) == 1:
        return show(run)
    return show(run, pathlib.Path(tempfile.mkdtemp(dir=tmp_path)))


def name_of(row):
    show, *_, keys = row
    return f"{show.__name__}-{next(iter(keys))}"


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.slow] * (row[0] in TRACES)) for row in WALK],
    ids=name_of,
)
def test_another_value_has_an_effect(row, folder, tmp_path):
    show, *changes, keys = row
    before = shown(show, tmp_path, folder, *changes)
    idle = [
        key for key, value in keys.items()
        if shown(show, tmp_path, folder, *changes, {key: value}) == before
    ]  # fmt: skip
    assert not idle


@pytest.mark.parametrize(
    "show", [show for show in dict.fromkeys(row[0] for row in WALK) if show not in TRACES]
)
def test_the_same_config_shows_the_same(show, folder, tmp_path):
    small, needed = next(row[1:3] for row in WALK if row[0] is show)
    assert shown(show, tmp_path, folder, small, needed) == shown(
        show, tmp_path, folder, small, needed
    )


@pytest.mark.parametrize("row", [row for row in WALK if row[2]], ids=name_of)
def test_without_what_it_needs_it_is_refused(row, folder):
    _, small, needed, keys = row
    small = {key: value for key, value in named(small, folder).items() if key not in needed}
    for key, value in named(keys, folder).items():
        with pytest.raises(config_lib.ConfigError, match=re.escape(key)):
            traced.resolved(small, {key: value})


@pytest.mark.parametrize("key", FILLED_IN)
def test_what_the_data_say_cannot_be_set(key, folder):
    run = traced.resolved(named(CLICKS, folder))
    known = config_lib.get_value(run, key)
    traced.resolved(named(CLICKS, folder), {key: known})  # as a saved config has it
    with pytest.raises(config_lib.ConfigError, match=re.escape(key)):
        traced.resolved(named(CLICKS, folder), {key: FILLED_IN[key]})
