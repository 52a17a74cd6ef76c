"""Compares models of clicks on generated records: how good their odds of the held-out ones are.

    python scripts/compare_tables.py [--records 5000000] [--only logistic dense ...] [--devices 4]
        [--staleness 4]

"law" is the best that there is: the odds by which the records were drawn. "logistic" is logistic
regression over all ids, with the numbers in buckets. "dense" is DLRM on one device, written without
llmx's tables and trainer: one array of all rows, of which a gradient is taken whole. "trainer" is
the same DLRM by llmx.train, on as many CPU devices as --devices says, whose rows' updates come
--staleness steps late. All see each record once, in the same order. Rows are trained by Adagrad,
the network by Adam.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from llmx.data import config as data_config
from llmx.data import dataset as data_lib
from llmx.data.records import generated
from llmx.data.records.dataset import RecordDataset
from llmx.evaluate import clicks
from llmx.model.recommender import recommender
from llmx.model.recommender.config import RecommenderConfig

CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "dlrm.py"
DLRM = RecommenderConfig(name="dlrm", width=16, bottom=(512, 256, 64, 16), top=(512, 256))
# Of Adagrad's g / sqrt(sum of g^2 + eps). Gradients of a mean over a batch are small: of a row that
# one record of 4096 names they are about 1e-5, and eps is what keeps such rows from jumping.
EPS = 1e-8
BUCKETS = 20  # of each number, for logistic regression
MODELS = ("law", "logistic", "dense", "trainer")
COLUMNS = ("auc", "log_loss", "normalized_entropy", "calibration", "calibration_error")


def one_table(schema, ids: np.ndarray) -> np.ndarray:
    """Ids [B, I] as rows of one array that has all tables, one behind the other; -1 stays."""
    bases = np.cumsum([0] + [feature.rows for feature in schema.features])[:-1]
    return np.where(ids >= 0, ids + bases.astype(np.int32), -1)


def rows_of(table: jax.Array, ids: jax.Array) -> jax.Array:
    """[B, I, D]; zeros where there is no id."""
    return jnp.where(ids[..., None] >= 0, jnp.take(table, jnp.maximum(ids, 0), axis=0), 0)


def logistic(schema, edges: np.ndarray) -> tuple[dict, Callable]:
    """(parameters, logits) of a weight for each id and for each bucket of each number."""
    total = sum(feature.rows for feature in schema.features)
    params = {
        "table": jnp.zeros((total, 1)), "numbers": jnp.zeros((len(schema.dense), BUCKETS)),
        "bias": jnp.zeros(()),
    }  # fmt: skip

    def logits(params, dense, ids):
        bucket = (dense[..., None] > edges).sum(axis=-1)  # [B, F]
        of_numbers = jnp.take_along_axis(params["numbers"].T, bucket, axis=0).sum(axis=1)
        return rows_of(params["table"], ids)[..., 0].sum(axis=1) + of_numbers + params["bias"]

    return params, logits


def dlrm(schema, seed: int) -> tuple[dict, Callable]:
    """(parameters, logits) of DLRM over one array of rows."""
    lengths = {feature.name: 0 for feature in schema.features}
    model = recommender.make(DLRM, num_dense=len(schema.dense), lengths=lengths)
    of_model, of_table = jax.random.split(jax.random.key(seed))
    bounds = np.concatenate([
        np.full((feature.rows, 1), feature.rows**-0.5, np.float32) for feature in schema.features
    ])  # fmt: skip
    table = bounds * jax.random.uniform(of_table, (len(bounds), DLRM.width), minval=-1)
    params = {"table": table, "model": model.init(of_model)}

    def logits(params, dense, ids):
        rows = rows_of(params["table"], ids)
        embedded = {name: rows[:, at] for at, name in enumerate(lengths)}
        return model.logits(params["model"], dense, embedded, {})

    return params, logits


def trained(
    data: RecordDataset, params: Any, logits: Callable, *, batch_size: int, rate: float,
    model_rate: float,
) -> tuple[Any, float]:  # fmt: skip
    """Parameters after one epoch, and the seconds of the middle step.

    `rate` is Adagrad's, of all but the network, whose Adam has `model_rate`.
    """
    optimizer = optax.multi_transform(
        {
            "rows": optax.adagrad(rate, initial_accumulator_value=0.0, eps=EPS),
            "model": optax.adam(model_rate),
        },
        {name: "model" if name == "model" else "rows" for name in params},
    )

    def loss(params, dense, ids, labels):
        nats, _ = recommender.losses(logits(params, dense, ids), labels)
        return nats.mean()

    def step(params, state, dense, ids, labels):
        value, gradient = jax.value_and_grad(loss)(params, dense, ids, labels)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    step = jax.jit(step, donate_argnums=(0, 1))
    state, seconds, value = optimizer.init(params), [], 0.0
    number = data.num_train_windows // batch_size
    for at in range(number):
        batch = data.train_rows(at, range(batch_size), batch_size)
        begun = time.perf_counter()
        params, state, value = step(params, state, *arrays(data, batch))
        value.block_until_ready()
        seconds.append(time.perf_counter() - begun)
        if at % 100 == 0:
            print(f"  step {at} of {number}: loss {value:.4f}", file=sys.stderr)
    return params, float(np.median(seconds))


def arrays(data: RecordDataset, batch: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    labels = batch["targets"][:, 0].astype(np.float32)
    return batch["dense"][:, 0], one_table(data.schema, batch["ids"][:, 0]), labels


def scored(data: RecordDataset, odds_of: Callable, batch_size: int) -> dict[str, float]:
    """The measures over all held-out records; `odds_of` takes a batch."""
    scores = clicks.Scores()
    for index in range(-(-data.num_held_out_windows // batch_size)):
        batch = data.held_out_rows(index, range(batch_size), batch_size)
        scores.add(odds_of(batch), batch["targets"], batch["weights"])
    return scores.result()


def of_law(data: RecordDataset, source: str) -> dict[str, float]:
    """Those of the law's own odds, of the same records: the last of the source."""
    law, left, scores = generated.parse(source), data.num_held_out_windows, clicks.Scores()
    for number in reversed(range(law.num_shards)):
        chunk, odds = generated.shard(law, number)
        take = min(left, len(odds))
        at = slice(len(odds) - take, None)
        scores.add(odds[at], chunk.labels[at], np.ones(take))
        left -= take
        if not left:
            break
    return scores.result()


def compare(args: argparse.Namespace, data: RecordDataset, source: str) -> dict[str, dict]:
    """The measures of each model by name."""
    found = {}
    dense = data.train_rows(0, range(10_000), 10_000)["dense"][:, 0]
    edges = np.quantile(dense, np.linspace(0, 1, BUCKETS + 1)[1:-1], axis=0).T
    makers = {
        "logistic": lambda: (*logistic(data.schema, edges), args.logistic_rate),
        "dense": lambda: (*dlrm(data.schema, args.seed), args.rate),
    }
    for name in args.only:
        begun = time.perf_counter()
        if name == "law":
            found[name] = of_law(data, source)
        elif name == "trainer":
            found[name] = of_trainer(args, data, source)
        else:
            found[name] = of_model(args, data, *makers[name]())
        found[name]["seconds"] = time.perf_counter() - begun
        print(line(name, found[name]), flush=True)
    return found


def of_model(
    args: argparse.Namespace, data: RecordDataset, params: Any, logits: Callable, rate: float
) -> dict[str, float]:
    """The measures of a model behind its training, and "step": seconds of one."""
    params, step = trained(
        data, params, logits, batch_size=args.batch, rate=rate, model_rate=args.model_rate
    )
    run = jax.jit(logits)

    def odds(batch):
        dense, ids, _ = arrays(data, batch)
        return run(params, dense, ids)

    return scored(data, odds, args.batch) | {"step": step}


def of_trainer(args: argparse.Namespace, data: RecordDataset, source: str) -> dict[str, float]:
    """The measures of llmx.train's run, by llmx.evaluate, and "step": seconds of one."""
    steps = data.num_train_windows // args.batch
    values = {
        "data.sources": f"('{source}',)", "data.cache_dir": args.cache, "seed": args.seed,
        "batch.size": args.batch, "steps": steps, "mesh.data": args.devices,
        "launch.cpu_devices": args.devices, "model.recommender.width": DLRM.width,
        "model.recommender.bottom": DLRM.bottom, "model.recommender.top": DLRM.top,
        "optimizer.learning_rate": args.model_rate, "optimizer.schedule": args.schedule,
        "optimizer.warmup_steps": args.warmup, "optimizer.b2": 0.999, "optimizer.clip_norm": 0.0,
        "optimizer.weight_decay": 0.0, "tables.optimizer": "adagrad",
        # Where optax adds its eps, sums of squares begin with it.
        "tables.initial_square": EPS, "tables.eps": 0.0,
        "tables.learning_rate": args.rate, "tables.staleness": args.staleness,
        "evaluation.every": 0, "evaluation.batches": 1,
        "checkpoint.every": steps, "metrics.log_every": 10,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--config.{key}={value}" for key, value in values.items()]
        train = ["llmx.train", "--config", str(CONFIG), f"--config.workdir={folder}", *flags]
        subprocess.run([sys.executable, "-m", *train], check=True, stdout=sys.stderr)
        evaluate = ["llmx.evaluate", "--workdir", folder, "--batches", "0", "--json"]
        said = subprocess.run(
            [sys.executable, "-m", *evaluate], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        lines = pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    seconds = [one["step_seconds"] for one in records if "step_seconds" in one]
    found = json.loads(said.splitlines()[-1])
    return {"log_loss": found["loss"]} | found | {"step": float(np.median(seconds))}


def line(name: str, measures: dict[str, float]) -> str:
    values = " | ".join(f"{measures[column]:.4f}" for column in COLUMNS)
    step = f"{1e3 * measures['step']:.0f}" if "step" in measures else ""
    return f"| {name} | {values} | {step} | {measures['seconds']:.0f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=5_000_000)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=0.05, help="of DLRM's rows")
    parser.add_argument("--model-rate", type=float, default=1e-3, help="of DLRM's network")
    parser.add_argument("--logistic-rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=pathlib.Path, default=data_lib.DATA_CACHE)
    parser.add_argument("--devices", type=int, default=1, help="of the trainer")
    parser.add_argument("--staleness", type=int, default=0, help="of the trainer: steps")
    parser.add_argument("--schedule", default="constant", help="of the trainer's rates")
    parser.add_argument("--warmup", type=int, default=0, help="of the trainer's rates: steps")
    parser.add_argument("--only", nargs="+", default=MODELS, choices=MODELS)
    args = parser.parse_args()
    source = f"{generated.PREFIXES[0]}{args.records}"
    data = data_lib.open_dataset(
        data_config.DataConfig(format="records", sources=(source,), cache_dir=str(args.cache)),
        sequence_length=1, seed=args.seed, log=lambda text: print(text, file=sys.stderr),
    )  # fmt: skip
    print(f"| model | {' | '.join(COLUMNS)} | step, ms | seconds |")
    print("| --- " * (len(COLUMNS) + 3) + "|")
    compare(args, data, source)
    return 0


if __name__ == "__main__":
    sys.exit(main())
