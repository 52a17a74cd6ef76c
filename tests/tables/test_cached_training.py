"""Runs whose rows are in host memory equal those with whole tables on the devices; they go on bit
for bit, on other devices and with another cache."""

import re

import jax
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from support import runs
from tables import test_training as whole_tables

from llmx import config as config_lib
from llmx import library
from llmx.evaluate import __main__ as evaluate_command
from llmx.model import looked_up
from llmx.tables.cached import Cached


def trained_with_a_cache(name, listed, **keys):
    """(losses, parameters) of steps whose batches get their slots as `llmx.train` gives them."""
    config = whole_tables.made(name, **keys)
    recipe = runs.make_recipe(config)
    step, losses, rows = runs.make_train_step(recipe), [], Cached(recipe.loss.execution.tables)
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)
        for batch in listed:
            ids = looked_up.raw_ids(config.model.ngram_tables, config.model.ngram_rows, batch)
            extra = dict(state.extra)
            extra[looked_up.TABLES], slots = rows.prepare(extra[looked_up.TABLES], ids)
            put = runs.put_batch(recipe, looked_up.with_slots(batch, slots))
            state, report = step(state._replace(extra=extra), put)
            losses.append(float(report.loss))
    return losses, jax.device_get(state.params), rows


@pytest.mark.slow
def test_ngrams_with_a_cache_equal_whole_tables():
    """In 100 slots for 194 rows, over two devices and microbatches: as one device."""
    listed = whole_tables.batches("ngrams")
    for number, batch in enumerate(listed):  # a batch does not name every row
        batch["tokens"] = batch["tokens"] // 12 + 5 * number
    wanted = whole_tables.train(whole_tables.made("ngrams"), listed)
    losses, params, rows = trained_with_a_cache(
        "ngrams", listed, tables__cache_rows=100, tables__host_gib=0.001, mesh={"data": 2},
        batch__accumulation=3,
    )  # fmt: skip
    np.testing.assert_allclose(losses, wanted[0], **whole_tables.PARITY)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **whole_tables.PARITY), params, wanted[1]
    )
    assert len(rows.rows.admitted) > 100 and 0 < rows.scalars()["cache_hits"] < 1


CACHE = dict(tables__cache_rows=600, tables__host_gib=0.01)


@pytest.mark.parametrize(
    "name, keys, part",
    [
        ("dlrm", dict(tables__host_gib=1.0), "tables.host_gib=1.0 has no effect"),
        ("dlrm", dict(tables__admit_after=2), "tables.admit_after=2 has no effect"),
        ("dlrm", dict(data__records__ids="exact"), "ids without a bound need tables.cache_rows"),
        ("dlrm", dict(data__records__ids="two"), "data.records.ids='two' is unknown"),
        ("dlrm", dict(tables__cache_rows=10**6, tables__host_gib=0.1), "tables.host_gib=0.1 is fo"),
        ("dlrm", CACHE | dict(checkpoint__local_directory="/x"), "checkpoint.local_directory='/x'"),
        ("dlrm", CACHE | dict(workdir="s3://bucket/run"), "are not read from object stores"),
        ("dlrm", CACHE | dict(tables__staleness=1), "an update that waits could come to a slot"),
        ("dlrm", CACHE | dict(mesh={"data": 2}, sync__strategy="one_bit"), "it was not tried"),
        ("ngrams", CACHE | dict(sample__prompt="a"), "rows of the host are not read there"),
        ("ngrams", CACHE | dict(launch__num_processes=2), "rows are in the memory of one host"),
    ],
)
def test_what_does_not_go_with_a_cache_is_an_error(name, keys, part):
    with pytest.raises(config_lib.ConfigError, match=re.escape(part)):
        whole_tables.made(name, **keys)


def records_of_large_ids(path) -> str:
    """Hundreds of different ids of two features, by Zipf's law, of 64 bits and texts."""
    rng, number = np.random.default_rng(0), 1500
    ranks = rng.zipf(1.2, (number, 4))
    ranks = np.where(ranks < 300, ranks, rng.integers(1, 300, ranks.shape))
    columns = dict(
        label=(ranks[:, 0] % 3 == 0).astype(np.int64), a=rng.standard_normal(number),
        user=ranks[:, 0] * (2**40 + 7), word=[f"{rank:x}" for rank in ranks[:, 1]],
        seen=[row.tolist() for row in ranks[:, 2:] * 2**33],
    )  # fmt: skip
    pq.write_table(pa.table(columns), path)
    return str(path)


def run_of(folder, **keys):
    run = whole_tables.dlrm_run(folder)
    run.data.sources = (records_of_large_ids(folder.parent / "x.parquet"),)
    run.data.records.dense, run.data.records.features = ("a",), ("user", "word", "seen:2@user")
    run.data.records.ids, run.tables.cache_rows, run.tables.host_gib = "exact", 80, 0.00003
    run.tables.weight_decay, run.steps, run.checkpoint.every = 0.1, 48, 8
    run.tables.optimizer, run.tables.admit_after = "adam", 2
    for key, value in keys.items():
        config_lib.set_value(run, key.replace("__", "."), value)
    return run


def losses_of(found) -> list[float]:
    return [line["loss"] for line in found.history if line["kind"] in ("train", "eval")]


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_on_other_devices_with_another_cache(tmp_path, capsys):
    whole = library.fit(run_of(tmp_path / "a", evaluation__every=10))
    assert whole.done
    wanted = losses_of(whole)
    last = [line for line in whole.history if line["kind"] == "train"][-1]
    # Memory was full, and some ids were seen once only.
    assert last["rows_forgotten"] > 0 and 0 < last["cache_hits"] < 1
    assert last["host_rows"] == last["rows_admitted"] - last["rows_forgotten"]

    def stop(record):
        if record["kind"] == "train" and record["step"] == 13:
            raise KeyboardInterrupt

    stopped = library.fit(run_of(tmp_path / "b"), callbacks=[stop])
    assert not stopped.done and 13 <= stopped.step < 48
    # Its newest checkpoint is damaged: the one before is taken, of step 8.
    newest = max((tmp_path / "b/run/checkpoints").iterdir(), key=lambda path: int(path.name))
    with open(newest / "host_rows/rows.array", "r+b") as file:
        file.write(b"\1\2\3\4")
    other = dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, tables__cache_rows=90)
    again = library.fit(run_of(tmp_path / "b", **other))
    assert again.done and (tmp_path / f"b/run/checkpoints/{newest.name}.corrupt").exists()
    np.testing.assert_allclose(losses_of(again)[-2:], wanted[-2:], rtol=1e-5)
    again = library.fit(run_of(tmp_path / "c", evaluation__every=10), callbacks=[stop])
    again = library.fit(run_of(tmp_path / "c", evaluation__every=10, tables__cache_rows=85))
    assert losses_of(again)[-30:] == wanted[-30:]

    capsys.readouterr()
    command = ["--workdir", str(tmp_path / "a/run"), "--json"]
    assert evaluate_command.main(command) == 0
    assert f'"loss": {wanted[-1]}' in capsys.readouterr().out
