"""`llmx.fit`: a run inside a program, its callbacks, and parts passed as objects."""

import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import llmx
from llmx import config as config_lib
from llmx import generate
from llmx.config import recipe as recipe_lib
from llmx.config import state_memory
from llmx.data import objects
from llmx.evaluate import __main__ as evaluate
from llmx.model import families, losses
from llmx.runtime import exits
from llmx.runtime.signals import StopSignal
from llmx.step import optimizers

# One run serves several tests: they belong on one worker.
pytestmark = pytest.mark.xdist_group("library")

STEP_OF_DIFFERENCE = 1e-3  # times a random direction, of parameters of about 0.1
OF_DIFFERENCE = 2e-2  # relative: of second order in the step, and in fp32


class Counting:
    """Rows that count upwards from a number that depends on step and row."""

    num_held_out_rows = 11

    def __init__(self):
        self.asked = []

    def train_rows(self, step, rows, batch_size):
        self.asked.append(step)
        start_B1 = np.array([[step * batch_size + row] for row in rows])
        return self.of(start_B1)

    def held_out_rows(self, index, rows, batch_size):
        return self.of(np.array([[index * batch_size + row] for row in rows]).reshape(-1, 1))

    @staticmethod
    def of(start_B1):
        ids_BT = (start_B1 + np.arange(17)) % 64
        return {"tokens": ids_BT[:, :-1], "targets": ids_BT[:, 1:]}


def small(workdir="", **model) -> config_lib.Config:
    run = config_lib.default()
    run.workdir, run.steps, run.precision = str(workdir), 6, "fp32"
    sizes = dict(width=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32)
    run.model = families.preset("llama3", **sizes | model)
    run.batch.size, run.batch.sequence_length = 8, 16
    run.optimizer.warmup_steps, run.optimizer.learning_rate = 1, 0.1
    run.checkpoint.every, run.evaluation.every, run.metrics.log_every = 4, 3, 1
    run.metrics.progress, run.metrics.tensorboard, run.launch.compile_cache = "plain", False, ""
    run.data.num_threads = 0
    return run


def momentum(config, schedule, axes):
    return optax.sgd(schedule, momentum=config.b1)


def focal(nats_BT, log_z_BT):
    return jnp.square(1 - jnp.exp(-nats_BT)) * nats_BT


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A run with all parts of its own: (its run, its config, records, dataset)."""
    run, rows, found = small(tmp_path_factory.mktemp("library") / "run"), Counting(), []

    def broken(record):
        return record["not there"]

    parts = dict(optimizer=momentum, loss=focal, dataset=rows)
    return llmx.fit(run, callbacks=[broken, found.append], **parts), run, found, rows


def test_a_run_comes_back_whole(fitted):
    run, config, _, rows = fitted
    assert (run.done, run.why, run.step) == (True, "", 6)
    assert str(run.workdir) == config.workdir
    assert int(run.state.step) == 6 and run.params is run.state.params
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params))
    steps, values = run.curve()
    assert steps == [1, 2, 3, 4, 5, 6] and values[-1] < values[0]
    assert run.curve(kind="eval")[0] == [3, 6]
    assert sorted({*rows.asked}) == list(range(6))
    # What was passed is not kept, and not changed.
    assert config.data.sources == ("stdlib",) and config.optimizer.name == "adamw"
    assert not [name for name in optimizers.OPTIMIZERS if ":" in name] and not objects.OBJECTS
    assert list(losses.OF_TOKENS) == ["nats"]


def test_callbacks_get_each_record(fitted):
    run, _, found, _ = fitted
    of_checkpoints = [record for record in found if record["kind"] == "checkpoint"]
    assert [record["step"] for record in of_checkpoints] == [4, 6]
    assert all(os.path.isdir(record["path"]) for record in of_checkpoints)
    assert [record for record in found if record["kind"] != "checkpoint"] == run.history
    train = next(record for record in found if record["kind"] == "train")
    assert {"step", "tokens", "time", "loss", "grad_norm", "learning_rate"} <= train.keys()


def test_an_error_in_a_callback_is_a_warning_and_all_is_saved(fitted, tmp_path, capsys):
    run, _, found, _ = fitted
    assert list(run.callback_errors) == ["broken"]
    assert isinstance(run.callback_errors["broken"], KeyError)
    assert len(found) == len(run.history) + 2  # the callback behind it missed nothing

    def stops(record):
        if record["step"] == 2:
            raise KeyboardInterrupt
        if record["step"] == 1:
            raise OSError(28, "No space left on device", "log.csv")

    config = small(tmp_path / "run")
    stopped = llmx.fit(config, callbacks=[stops], dataset=Counting())
    assert (stopped.done, stopped.step) == (False, 3)  # the third was under way
    assert stopped.why == "stopped by callback stops"
    assert os.path.isdir(tmp_path / "run/checkpoints/3")
    printed = capsys.readouterr().out
    where = r"No space left on device: log.csv (test_library.py:"
    assert printed.count("warning: callback stops: ") == 1 and where in printed


@pytest.mark.slow  # trains twice
def test_ctrl_c_leaves_a_run_that_goes_on(tmp_path):
    config, found = small(tmp_path / "run"), []

    def interrupt(record):
        if record["kind"] == "train" and record["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    config.steps = 5
    run = llmx.fit(config, callbacks=[interrupt], dataset=Counting())
    assert not run.done and run.why == "SIGINT" and 2 <= run.step < 5
    again = llmx.fit(config, callbacks=[found.append], dataset=Counting())
    assert again.done and again.step == 5
    assert found[0]["step"] == run.step + 1  # earlier records are not sent again
    assert again.curve()[0] == [1, 2, 3, 4, 5]


class Interrupting(Counting):
    """Presses Ctrl-C when the data are opened."""

    @property
    def fingerprint(self):
        os.kill(os.getpid(), signal.SIGINT)
        return "another"


def test_ctrl_c_before_the_first_step_is_an_exception(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llmx.fit(small(tmp_path), dataset=Interrupting())
    assert signal.getsignal(signal.SIGINT) is before
    assert not list(tmp_path.glob("checkpoints/*"))
    assert not (tmp_path / "owner.json").exists()  # another run may have the directory


def test_ctrl_c_twice_is_an_exception():
    with StopSignal(log=print, raises=True) as stop:
        stop.start()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the second is an exception")


def test_generate_and_evaluate_find_the_run(fitted, capsys):
    """Its optimizer, loss and data are not here any more."""
    workdir = str(fitted[0].workdir)
    command = ["--workdir", workdir, "--prompt", "a", "--max-tokens", "2"]
    assert generate.main(command) == exits.DONE
    assert capsys.readouterr().out.startswith("a")
    assert evaluate.main(["--workdir", workdir]) == exits.REFUSED
    told = capsys.readouterr().err
    assert "'object:Counting' was an object of a program, which is not here" in told
    assert "--data FILE" in told


def test_what_is_wrong_is_raised(fitted, tmp_path):
    config = small(tmp_path / "run")
    with pytest.raises(ValueError, match=r"workdir='' names no folder"):
        llmx.fit(small())
    with pytest.raises(ValueError, match="must be a list of functions"):
        llmx.fit(config, callbacks=print)
    with pytest.raises(ValueError, match="callbacks has 3, which is no function"):
        llmx.fit(config, callbacks=[3])
    with pytest.raises(ValueError, match=r"lambda config, schedule, axes: optax.sgd\(schedule\)"):
        llmx.fit(config, optimizer=optax.sgd(0.1))
    with pytest.raises(ValueError, match="is a list without train_rows"):
        llmx.fit(config, dataset=[1, 2])
    config.batch.size, config.seed = 0, -1
    with pytest.raises(config_lib.ConfigError) as raised:
        llmx.fit(config)
    assert len(raised.value.problems) == 2
    # The run of the fixture has an optimizer that this call does not give.
    other = small(fitted[0].workdir)
    with pytest.raises(ValueError, match="checkpoint"):
        llmx.fit(other, dataset=Counting(), optimizer=lambda c, s, axes: optax.adam(s))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"tokens": np.zeros((2, 4))}, r"have no \['targets'\]: give tokens, targets"),
        ({"tokens": np.zeros((2, 4)), "targets": np.zeros((2, 4)), "mask": 1}, r"\['mask'\] too"),
        ({"tokens": np.zeros((2, 5)), "targets": np.zeros((2, 4))}, r"shape \(2, 5\): give \(2, 4"),
        ({"tokens": np.full((2, 4), 257), "targets": np.zeros((2, 4))}, "token 257: ids are 0 to"),
        ({"tokens": np.zeros((2, 4)), "targets": np.full((2, 4), -1)}, "has the token -1"),
    ],
)
def test_rows_that_are_none(monkeypatch, rows, words):
    class Given:
        def train_rows(self, step, asked, batch_size):
            return rows

    monkeypatch.setitem(objects.OBJECTS, "object:x", Given())
    dataset = objects.ObjectDataset("object:x", sequence_length=4, num_threads=0, prefetch=0)
    with pytest.raises(ValueError, match=words):
        dataset.train_rows(0, [0, 1], 8)


def test_rows_are_completed(monkeypatch):
    monkeypatch.setitem(objects.OBJECTS, "object:x", Counting())
    dataset = objects.ObjectDataset("object:x", sequence_length=16, num_threads=0, prefetch=0)
    batch = dataset.train_rows(2, [0, 3], 8)
    assert batch["tokens"][1, 0] == 2 * 8 + 3 and batch["targets"][1, 0] == 2 * 8 + 4
    assert batch["positions"].tolist() == [list(range(16))] * 2
    assert (batch["weights"] == 1).all() and (batch["segment_ids"] == 1).all()
    # 11 rows are held out: of the second batch of 8 the first three.
    held_out = dataset.held_out_rows(1, [2, 3], 8)
    assert held_out["tokens"][0, 0] == 10 and held_out["weights"].sum(axis=1).tolist() == [16, 0]


@pytest.mark.slow  # compiles four programs
def test_a_loss_of_tokens_is_what_is_differentiated(monkeypatch):
    """Its derivative along a direction is the difference of its values; reports stay in nats."""
    monkeypatch.setitem(losses.OF_TOKENS, "focal", focal)
    config = small()
    config.model.vocab_size, config.batch.accumulation = 64, 2
    config.mesh.data = 1
    batch = {**Counting.of(np.arange(8)[:, None])}
    batch |= {"segment_ids": np.ones((8, 16)), "positions": np.tile(np.arange(16), (8, 1))}
    batch["weights"] = np.arange(128).reshape(8, 16) % 3

    batch = {key: np.asarray(value) for key, value in batch.items()}

    def taken(name):
        """(gradients of a batch and parameters, the parameters, their direction, and losses)."""
        config.loss.of_tokens = name
        recipe = recipe_lib.make_recipe(config, devices=jax.devices()[:1])
        types = recipe.abstract_batch
        given = {
            key: jax.device_put(batch[key].astype(types[key].dtype), types[key].sharding)
            for key in types
        }
        with jax.set_mesh(recipe.mesh):
            params = recipe.init(0).params
            found, _ = jax.jit(recipe.gradient.take)(
                params, given, recipe.gradient.init(params), ()
            )
            nats = jax.jit(lambda p: recipe.loss.apply.losses(p, given, recipe.loss.execution))
            random = np.random.default_rng(0)
            direction = jax.tree.map(lambda leaf: random.normal(size=leaf.shape), params)
            moved = lambda by: jax.tree.map(  # noqa: E731
                lambda leaf, along: leaf + by * along.astype(np.float32), params, direction
            )
            ends = [nats(moved(sign * STEP_OF_DIFFERENCE)) for sign in (1, -1)]
        pairs = zip(jax.tree.leaves(found.tree), jax.tree.leaves(direction), strict=True)
        along = sum(float(np.sum(np.asarray(leaf) * by)) for leaf, by in pairs)
        return float(found.loss), along, ends

    share = batch["weights"] / batch["weights"].sum()
    values = {"nats": lambda nats, log_z: nats, "focal": focal}
    reported = []
    for name, of_tokens in values.items():
        loss, along, ends = taken(name)
        above, below = (float(np.sum(np.asarray(of_tokens(*end)) * share)) for end in ends)
        assert along == pytest.approx((above - below) / (2 * STEP_OF_DIFFERENCE), rel=OF_DIFFERENCE)
        reported.append(loss)
    assert reported[0] == pytest.approx(reported[1], rel=1e-6)


def test_the_memory_of_an_added_optimizer_is_that_of_two_moments():
    config = small()
    config.model.vocab_size, config.mesh.data = 64, 1
    of_adam = state_memory.of(config)
    config.optimizer.name = "object:momentum"
    assert state_memory.of(config) == of_adam


def test_importing_llmx_imports_nothing_else():
    code = "import sys, llmx; print(sorted({'jax', 'numpy', 'llmx.train'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'fti'"):
        llmx.fti  # noqa: B018
