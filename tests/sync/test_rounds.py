"""Groups of replicas that are programs of their own: rounds are those of one program, by the oracle
in float64; groups that come late, leave and come back; and what is refused."""

import concurrent.futures
import dataclasses
import pathlib
import threading

import jax
import numpy as np
import pytest
from support import replica_oracle as oracle
from support.replica_oracle import Problem, Settings
from support.toy_replicas import Run, problem_of

from llmx import config as config_lib
from llmx.config import recipe
from llmx.data import remote
from llmx.sync import rounds, strategy
from llmx.sync.config import SyncConfig
from llmx.sync.round_files import Outer, RoundFiles

CLOSE = 1e-4  # of the largest parameter: 40 steps in fp32
SETTINGS = Settings(steps=38, warmup=0, clip=2.0)  # five rounds of 7, and one that is cut short
SIZES = (2, 1)  # replicas of the groups


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(rounds, "POLL_SECONDS", 0.01)


HERE = str(pathlib.Path(__file__).parent)  # a folder that is there


def of_group(problem: Problem, group: int) -> Problem:
    """A group's part of a problem of all replicas."""
    first = sum(SIZES[:group])
    own = slice(first, first + SIZES[group])
    centers = [{k: x[own] for k, x in each.items()} for each in problem.centers]
    return dataclasses.replace(problem, centers=centers, tokens=problem.tokens[:, own])


class Group:
    """One group's run, in a thread."""

    def __init__(self, folder, problem, group: int, name: str = "diloco", state=None, **values):
        values = dict(round_seconds=60.0, groups=len(SIZES)) | values
        self.found = {}
        self.run = Run(
            name, of_group(problem, group), SETTINGS, first=sum(SIZES[:group]), state=state,
            group=group, exchange=str(folder), **values,
        )  # fmt: skip

    def go(self, until: int = SETTINGS.steps) -> "Group":
        """Steps, and the parameters after each."""
        while self.run.steps < until:
            self.run.advance()
            self.found[self.run.steps] = self.run.params()
        return self

    @property
    def state(self):
        return jax.device_get(self.run.state)


def together(*calls):
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def assert_close(got: dict, want: dict):
    for name in want:
        error = np.abs(got[name] - want[name]).max() / np.abs(want[name]).max()
        assert error < CLOSE, (name, error)


def assert_same(one: dict, other: dict):
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


ENDS = (7, 14, 21, 28, 35, 38)


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_two_groups_do_what_three_replicas_do_in_one_program(tmp_path, name):
    """One group has two replicas. Replicas and groups have unequal numbers of tokens."""
    problem = problem_of(3, 1, SETTINGS.steps)
    wanted, _ = oracle.local(problem, SETTINGS, name, by_tokens=True)
    groups = together(
        *(lambda g=g: Group(tmp_path, problem, g, name).go() for g in range(2))
    )  # fmt: skip
    for end in ENDS:
        assert_close(groups[0].found[end], wanted[end - 1])
        assert_same(groups[0].found[end], groups[1].found[end])
    # What older rounds have left is gone.
    assert sorted(path.name for path in (tmp_path / "outer").glob("*.json")) == [
        "0000000035.json", "0000000038.json"
    ]  # fmt: skip


def test_a_group_that_leaves_is_left_out_and_catches_up(tmp_path):
    """Group 1 ends within the second round. Group 0 waits for it once, and goes on alone; group 1
    comes back with its state of then, and goes on where group 0 is."""
    problem = problem_of(3, 1, SETTINGS.steps)
    first = together(
        lambda: Group(tmp_path, problem, 0).go(until=7),
        lambda: Group(tmp_path, problem, 1).go(until=10),
    )
    kept = first[1].state
    assert int(kept.step) == 10
    alone = Group(tmp_path, problem, 0, state=first[0].state, round_seconds=0.5)
    alone.go(until=24)  # the rounds that end at 14 and 21
    files = RoundFiles(str(tmp_path), 0, {k: x.shape for k, x in problem.start.items()})
    assert (files.closed(14), files.closed(21)) == ([0], [0])
    back = Group(tmp_path, problem, 1, state=kept)
    assert back.run.steps == 21
    assert_same(back.run.params(), alone.found[21])
    # Moments are those that it had; tokens of the round that it has missed do not count.
    for got, was in zip(
        jax.tree.leaves(back.state.sync.opt_state), jax.tree.leaves(kept.sync.opt_state),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(got, was)
    assert not back.state.sync.tokens.any() and kept.sync.tokens.any()
    both = [Group(tmp_path, problem, 0, state=alone.state), back]
    for end in (28, 35, 38):
        together(*(lambda each=each, end=end: each.go(until=end) for each in both))
        assert files.closed(end) == [0, 1]
        assert_same(both[0].found[end], both[1].found[end])
    undisturbed, _ = oracle.local(problem, SETTINGS, "diloco", by_tokens=True)
    apart = {k: np.abs(both[0].found[38][k] - undisturbed[-1][k]).max() for k in undisturbed[-1]}
    away = {k: np.abs(undisturbed[-1][k] - problem.start[k]).max() for k in apart}
    assert all(0 < apart[k] < 0.3 * away[k] for k in apart), (apart, away)


def test_a_group_without_a_state_begins_where_the_others_are(tmp_path):
    problem = problem_of(3, 1, SETTINGS.steps)
    alone = Group(tmp_path, problem, 0, round_seconds=0.1).go(until=16)
    new = Group(tmp_path, problem, 1)
    assert new.run.steps == 14
    assert_same(new.run.params(), alone.found[14])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(new.state.sync.opt_state[0].mu))
    np.testing.assert_array_equal(
        new.state.sync.outer["norm"], alone.state.sync.outer["norm"]
    )  # fmt: skip


def test_a_group_that_comes_late_takes_over_what_the_others_have_made(tmp_path):
    """It has trained the whole round, and what it moved is dropped."""
    problem = problem_of(3, 1, SETTINGS.steps)
    both = [Group(tmp_path, problem, g, round_seconds=0.1) for g in range(2)]
    both[0].go(until=7)
    both[1].go(until=7)
    assert_same(both[0].found[7], both[1].found[7])
    only, _ = oracle.local(of_group(problem, 0), SETTINGS, "diloco", by_tokens=True)
    assert_close(both[1].found[7], only[6])


def test_what_is_not_finite_does_not_count(tmp_path):
    problem = problem_of(3, 1, SETTINGS.steps)
    problem.centers[3]["norm"][2] = np.nan  # of the one replica of group 1
    both = together(*(lambda g=g: Group(tmp_path, problem, g).go(until=7) for g in range(2)))
    only, _ = oracle.local(of_group(problem, 0), SETTINGS, "diloco", by_tokens=True)
    assert_close(both[1].found[7], only[6])
    assert_same(both[0].found[7], both[1].found[7])


def test_a_round_in_which_none_has_trained_changes_nothing(tmp_path):
    problem = problem_of(3, 1, SETTINGS.steps)
    problem.tokens[7:14] = 0
    both = together(*(lambda g=g: Group(tmp_path, problem, g).go(until=14) for g in range(2)))
    for group in both:
        assert_same(group.found[14], group.found[7])


def test_the_first_to_close_a_round_says_who_is_in_it(tmp_path):
    """Twenty writers at once; all read the same."""
    files = [RoundFiles(str(tmp_path), g, {}) for g in range(20)]
    start = threading.Barrier(20)

    def close(group):
        start.wait()
        return tuple(files[group].close(7, [group]))

    assert len(set(together(*(lambda g=g: close(g) for g in range(20))))) == 1


def test_what_was_published_stays(tmp_path):
    """A group that was killed behind it and takes the round again adds nothing else."""
    files = RoundFiles(str(tmp_path), 1, {"w": (2,)})
    files.publish(7, {"w": np.float32([1, 2])}, 10.0)
    files.publish(7, {"w": np.float32([3, 4])}, 20.0)
    assert files.tokens(7, [1]) == [10.0]
    np.testing.assert_array_equal(files.moved(7, 1, "w"), [1, 2])
    assert files.groups_in(7) == (set(), {1})


def test_a_damaged_file_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)
    files = RoundFiles(str(tmp_path), 1, {"a/w": (2,)})
    files.publish(7, {"a/w": np.float32([1, 2])}, 10.0)
    [path] = tmp_path.rglob("a.w")
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    with pytest.raises(OSError, match=r"a\.w is damaged: its checksum differs"):
        files.moved(7, 1, "a/w")
    files.write_outer(Outer(7, {"a/w": np.float32([1, 2])}, {}))
    path = tmp_path / "outer/0000000007/0001/params/a.w"
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.w is gone"):
        files.read_outer(7)


def test_of_two_that_write_what_all_share_the_first_counts(tmp_path):
    """As before the first round, where every group writes what it begins with: one is still at it
    when the other is done."""
    shapes = {"a": (2,), "b": (2,)}
    first, late = (RoundFiles(str(tmp_path), group, shapes) for group in range(2))
    of = lambda group: {name: np.float32([group, 7]) for name in shapes}  # noqa: E731
    write = late._write_arrays

    def overtaken(place, arrays):
        write(place, arrays)
        first.write_outer(Outer(0, of(0), {"a": np.float32([1, 2])}))

    late._write_arrays = overtaken
    late.write_outer(Outer(0, of(1), {}))
    for files in (first, late):
        found = files.read_outer(0)
        assert_same(found.params, of(0))
        assert_same(found.momentum, {"a": np.float32([1, 2])})
    # Files of the other are gone.
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parent.parent.name for path in files if path.suffix != ".json"} == {"0000"}


def test_an_exchange_in_an_object_store(tmp_path, monkeypatch):
    """TensorStore's store in memory stands for one."""
    import tensorstore

    from llmx.runtime import ownership

    store = tensorstore.KvStore.open({"driver": "memory"}).result()
    monkeypatch.setattr(ownership, "open_store", lambda folder: store)
    files = RoundFiles("s3://bucket/rounds", 3, {"w": (2,)})
    files.begin(7)
    files.publish(7, {"w": np.float32([1, 2])}, 10.0)
    assert files.groups_in(7) == ({3}, {3}) and files.close(7, [3]) == [3]
    for steps in (0, 7, 14, 21):
        files.write_outer(Outer(steps, {"w": np.float32([steps, 2])}, {}))
    assert files.newest() == 21 and files.read_outer(14).params["w"][0] == 14
    assert files.closed(7) is None and len(store.list().result()) == 4


# ---------------------------------------------------------------------------------------- errors


def test_a_folder_that_is_missing_or_of_other_groups_is_refused(tmp_path, monkeypatch):
    problem = problem_of(3, 1, SETTINGS.steps)
    with pytest.raises(ValueError, match="nowhere is no folder: make the one that all groups see"):
        Group(tmp_path / "nowhere", problem, 0)
    files = RoundFiles(str(tmp_path), 0, {})
    files.agree({"steps": 10, "sync.every": 7, "shape of w": (2, 3)})
    files.agree({"steps": 10, "sync.every": 7, "shape of w": (2, 3)})
    with pytest.raises(ValueError) as error:
        files.agree({"steps": 12, "sync.every": 7, "shape of v": (2, 3)})
    for word in (
        "steps is 10 there and 12 here", "shape of w is [2, 3] there and None here",
        "same config", "another folder",
    ):  # fmt: skip
        assert word in str(error.value)
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)
    (tmp_path / "rounds").write_text("a file in the place of a folder")
    with pytest.raises(OSError, match=f"sync.exchange={tmp_path} cannot be used: "):
        files.begin(7)


CHANGES = {
    "pruning": dict(pruning__method="fixed", pruning__masks_from="runs/other"),
    "quantization": dict(quantization__bits=4),
    "precision": dict(precision="fp16"),
    "products": dict(products__format="fp8"),
    "distillation": dict(distillation__top_k=8),
    "experts": dict(experts__balance_weight=0.02),
    "preference": dict(preference__beta=0.2),
    "start_from": dict(start_from="runs/other"),
    "data": dict(data__format="preference"),
    "mesh": dict(mesh__stage=2),
    "sync": dict(sync__every=7),
}
MAY_DIFFER = dict(
    workdir="elsewhere", mesh__fsdp=4, batch__accumulation=2, data__sources=("elsewhere",),
    attention__implementation="plain", sync__group=1, sync__exchange="s3://bucket/rounds",
    sync__round_seconds=7.0, checkpoint__every=7, rollback__at=(3,), watchdog__save_seconds=7.0,
)  # fmt: skip


def changed(**values):
    whole = config_lib.default()
    whole.sync = SyncConfig("diloco", groups=2, exchange=HERE)
    for name, value in values.items():
        section, _, key = name.rpartition("__")
        setattr(vars(whole)[section] if section else whole, key, value)
    return recipe.agreed(whole)


@pytest.mark.parametrize("section", CHANGES)
def test_groups_that_train_otherwise_are_told_so(tmp_path, section):
    """A key counts unless it is named as one that may differ."""
    RoundFiles(str(tmp_path), 0, {}).agree(changed())
    with pytest.raises(ValueError) as error:
        RoundFiles(str(tmp_path), 1, {}).agree(changed(**CHANGES[section]))
    for name in CHANGES[section]:
        assert f"{name.replace('__', '.')} is " in str(error.value)


def test_groups_may_differ_in_where_they_compute():
    assert changed(**MAY_DIFFER) == changed()


@pytest.mark.parametrize(
    "values, words",
    [
        (dict(strategy="int8"), ["sync.groups=2 with sync.strategy='int8'", "use 'diloco'"]),
        (dict(group=2), ["sync.group=2", "groups are 0 to 1"]),
        (dict(exchange="not/there"), ["sync.exchange=not/there is no folder", "make the one"]),
        (dict(exchange=""), ["without sync.exchange", "a folder or URL that all groups see"]),
        (dict(exchange="xyz://bucket/key"), ["sync.exchange=xyz://", "no kind of store"]),
        (dict(warmup_steps=3), ["sync.warmup_steps=3", "set it to 0", "start_from"]),
        (dict(fragments=2), ["sync.fragments=2", "the whole model"]),
        (dict(overlap=True), ["sync.overlap=True", "between two steps"]),
        (dict(outer_format="int4"), ["sync.outer_format=int4", "fp32"]),
        (dict(average_moments=True), ["sync.average_moments=True", "keep their moments"]),
        (dict(round_seconds=2900.0), ["sync.round_seconds=2900", "watchdog.save_seconds=600"]),
        (dict(round_seconds=4000.0), ["sync.round_seconds=4000", "at most 3000"]),
        (dict(groups=0), ["sync.groups=0", "at least 1"]),
    ],
    ids=str,
)  # fmt: skip
def test_what_groups_cannot_go_with(values, words):
    whole = config_lib.default()
    whole.watchdog.save_seconds = 600.0 + 1000 * ("watchdog" not in str(words))
    whole.sync = SyncConfig(
        **dict(strategy="diloco", groups=2, group=1, exchange=HERE) | values
    )  # fmt: skip
    [found] = strategy.conflicts(whole)
    for word in words:
        assert word in found, found


def test_groups_without_an_error_have_none():
    whole = config_lib.default()
    whole.sync = SyncConfig("diloco", groups=2, group=1, exchange=HERE)
    assert strategy.conflicts(whole) == []
