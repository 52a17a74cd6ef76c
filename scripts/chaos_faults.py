"""The kinds of faults of scripts/chaos.py: what each does, when, and how a run may end after it."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import chaos_config

ROOT = pathlib.Path(__file__).resolve().parent.parent
PHASES = ("launch", "data", "restore", "compile", "step", "save")
STEPPED = ("step", "save")  # phases that come again and again
HALF = 12  # steps that some cases begin with
LONG_STOP = 2 * chaos_config.STEP_LIMIT
AGAIN = (75, 143)
# Of scripts/chaos.py: one fault with its run, and one start of the run's processes.
Case = Launch = Any


class Violation(Exception):
    """A fault ended in a way that it must not."""


class Missed(Exception):
    """The run had ended before the fault could strike, or this machine does not allow the fault."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of fault, and how it may end. `codes` () = the run must go on by itself."""

    phases: tuple[str, ...] = ("step",)  # in which it strikes
    strike: Callable[[Case, Launch], None] | None = None  # from outside
    inject: str = ""  # in the trainer, by scripts/chaos_config.py
    half: bool = False  # begins with a run that has done `HALF` steps
    prepare: Callable[[Case], None] | None = None  # before the launch
    mend: Callable[[Case], None] | None = None  # before the rerun
    flags: tuple[str, ...] = ()
    rerun_flags: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()  # of a stop
    words: tuple[str, ...] = ()  # regular expressions that the last line of a stop must match
    must_stop: bool = False
    killed: bool = False  # what would print the last line is killed too
    reference: str = ""  # injected into the undisturbed run too, and with its flags
    weight: int = 1  # how often it is drawn


def kill(pid: int, number: int) -> None:
    """Sends a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def strike_kill(case: Case, launch: Launch) -> None:
    kill(launch.trainer(case.victim), signal.SIGKILL)


def strike_kill_supervisor(case: Case, launch: Launch) -> None:
    kill(parent(launch.trainer(case.victim)), signal.SIGKILL)


def strike_kill_all(case: Case, launch: Launch) -> None:
    for _ in range(2):  # what the first round has missed was being started
        for pid in case.processes():
            kill(pid, signal.SIGKILL)


def strike_stop_short(case: Case, launch: Launch) -> None:
    _stop_for(launch.trainer(case.victim), case.random.uniform(0.5, 3))


def strike_stop_long(case: Case, launch: Launch) -> None:
    _stop_for(launch.trainer(case.victim), LONG_STOP)


def strike_stop_forever(case: Case, launch: Launch) -> None:
    kill(launch.trainer(case.victim), signal.SIGSTOP)


def _stop_for(pid: int, seconds: float) -> None:
    kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    kill(pid, signal.SIGCONT)


def strike_term_one(case: Case, launch: Launch) -> None:
    kill(launch.trainer(case.victim), signal.SIGTERM)


def strike_term_all(case: Case, launch: Launch) -> None:
    launch.process.send_signal(signal.SIGTERM)


def strike_second_owner(case: Case, launch: Launch) -> None:
    """Another run in the same work directory is refused; the first is not disturbed."""
    command = [sys.executable, "-m", "llmx.train", "--config", "scripts/chaos_config.py",
               "--workdir", str(case.workdir)]  # fmt: skip
    orders = dataclasses.replace(case.orders, folder=str(case.folder / "second"))
    (case.folder / "second").mkdir()
    surroundings = os.environ | {"LLMX_CHAOS": json.dumps(dataclasses.asdict(orders)),
                                 "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}  # fmt: skip
    begun = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    (case.folder / "second.log").write_text(done.stdout + done.stderr)
    seconds = time.monotonic() - begun
    if done.returncode == 0 and launch.process.poll() is not None:
        raise Missed("the first run had ended when the second one asked")

    def check() -> None:
        last = (done.stdout + done.stderr).strip().splitlines()[-1]
        if done.returncode != 2 or not re.search("own|in use|held", last):
            raise Violation(f"the second run: exit {done.returncode} in {seconds:.0f} s: {last}")

    case.checks.append(check)


def strike_vanish_checkpoints(case: Case, launch: Launch) -> None:
    _vanish(case.workdir / "checkpoints")


def bring_back_vanished(case: Case) -> None:
    """A run that has saved does not begin anew without its checkpoints."""
    for path in sorted(case.workdir.glob("vanished-checkpoints-*")):
        if not (case.workdir / "checkpoints").exists():
            path.rename(case.workdir / "checkpoints")


def strike_vanish_workdir(case: Case, launch: Launch) -> None:
    _vanish(case.workdir)


def _vanish(path: pathlib.Path) -> None:
    if not path.exists():
        raise Missed(f"no {path.name} yet")
    path.rename(path.with_name(f"vanished-{path.name}-{time.time_ns()}"))


def parent(pid: int) -> int:
    """The process id of the parent."""
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# -- files


def _files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def _damage(case: Case, path: pathlib.Path, how: str) -> None:
    raw = bytearray(path.read_bytes())
    if how == "truncate":
        raw = raw[: case.random.randrange(len(raw))]
    elif how == "flip":
        raw[case.random.randrange(len(raw))] ^= 1 << case.random.randrange(8)
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes(raw)
    with open(case.folder / "damage", "a") as file:
        print(how, path, file=file)


def _damage_newest(part: str, how: str) -> Callable[[Case], None]:
    """Damages one file of the newest checkpoint: of its arrays ("state") or its document."""

    def prepare(case: Case) -> None:
        _damage(case, case.random.choice(_files_of(case.newest() / part)), how)

    return prepare


def damage_all(case: Case) -> None:
    """Moves good copies aside and damages the document of every checkpoint."""
    shutil.copytree(case.workdir / "checkpoints", case.folder / "good")
    for path in (case.workdir / "checkpoints").glob("*/meta/metadata"):
        _damage(case, path, "truncate")


def bring_back(case: Case) -> None:
    shutil.rmtree(case.workdir / "checkpoints")
    shutil.copytree(case.folder / "good", case.workdir / "checkpoints")


def _shards_of(case: Case) -> pathlib.Path:
    (index,) = (case.session.folder / "data").glob("text-*/index.json")
    return index.parent


def damage_shard(case: Case) -> None:
    """A copy of the shards with one damaged file, named by `--config.data.sources`."""
    copy = case.folder / "shards"
    shutil.copytree(_shards_of(case), copy)
    how = case.random.choice(["truncate", "flip", "remove"])
    _damage(case, case.random.choice(_files_of(copy)), how)


# -- a full disk


def mount_small(case: Case) -> None:
    """The work directory is a tmpfs of few MiB."""
    case.workdir.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(case.workdir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missed(f"mount: {done.stderr.strip()}")
    case.session.mounts.append(case.workdir)


def _strike_disk_full(*, left: int, for_ever: bool) -> Callable[[Case, Launch], None]:
    def strike(case: Case, launch: Launch) -> None:
        ballast = case.workdir / "ballast"
        room = shutil.disk_usage(case.workdir).free - left
        with contextlib.suppress(OSError), open(ballast, "wb") as file:  # the run writes too
            while file.tell() < room:
                file.write(bytes(2**12))
        if not for_ever:
            time.sleep(1.5)
            ballast.unlink()

    return strike


def free_disk(case: Case) -> None:
    (case.workdir / "ballast").unlink(missing_ok=True)


ANY = ("launch", "data", "compile", "step", "save")
STEPPED = ("step", "save")
DATA = "--config.data.sources=('shards:{folder}/shards',)"
KINDS: dict[str, Kind] = {
    "none": Kind(),
    "kill": Kind(PHASES, strike_kill, weight=8),
    "kill_supervisor": Kind(ANY, strike_kill_supervisor, killed=True, weight=2),
    "kill_all": Kind(PHASES, strike_kill_all, killed=True, weight=3),
    "stop_short": Kind(PHASES, strike_stop_short, weight=2),
    "stop_long": Kind(("compile", "step", "save"), strike_stop_long),
    "stop_forever": Kind(("data", "compile", "step", "save"), strike_stop_forever, weight=2),
    "term_one": Kind(PHASES, strike_term_one, codes=AGAIN, weight=2),
    "term_all": Kind(PHASES, strike_term_all, codes=AGAIN, weight=3),
    "hang": Kind(inject="hang", weight=2),
    "hang_with_lock": Kind(inject="hang_with_lock"),
    "config": Kind(inject="rate", codes=(2,), words=("learning_rate",), must_stop=True),
    "seed": Kind(inject="seed", codes=(2,), words=("seed",), must_stop=True),
    "data": Kind(inject="data", codes=(2,), words=("data",), must_stop=True),
    "owner": Kind(("step",), strike_second_owner, weight=2),
    "truncate": Kind(half=True, prepare=_damage_newest("state", "truncate"), weight=2),
    "flip": Kind(half=True, prepare=_damage_newest("state", "flip"), weight=2),
    "truncate_meta": Kind(half=True, prepare=_damage_newest("meta", "truncate")),
    "flip_meta": Kind(half=True, prepare=_damage_newest("meta", "flip")),
    "remove_file": Kind(half=True, prepare=_damage_newest("", "remove")),
    "all_bad": Kind(
        half=True, prepare=damage_all, mend=bring_back, codes=(2,), must_stop=True,
        words=("good|bring back|move",),
    ),
    "disk_full": Kind(
        ("step", "save"), _strike_disk_full(left=2**16, for_ever=True), prepare=mount_small,
        mend=free_disk, codes=(74,), words=("full|space",),
    ),
    "disk_full_stop": Kind(
        ("step", "save"), _strike_disk_full(left=2**16, for_ever=True), prepare=mount_small,
        mend=free_disk, codes=(74,), words=("full|space",), must_stop=True,
        flags=("--config.checkpoint.on_failure=stop",),
    ),
    "disk_full_while": Kind(
        ("step", "save"), _strike_disk_full(left=0, for_ever=False), prepare=mount_small,
    ),
    "vanish_checkpoints": Kind(
        ("step", "save"), strike_vanish_checkpoints, mend=bring_back_vanished, codes=(2, 74)
    ),
    "vanish_workdir": Kind(("step", "save"), strike_vanish_workdir, codes=(2, 74)),
    "shard": Kind(
        prepare=damage_shard, flags=(DATA,), codes=(2,), must_stop=True, words=("shards",)
    ),
    "nan": Kind(inject="nan", codes=(3,), must_stop=True, words=("not finite", "run again")),
    "diverge": Kind(
        half=True, flags=("--config.optimizer.learning_rate=1e18",), codes=(3,), must_stop=True,
        rerun_flags=(f"--config.resume_step={HALF}",), words=("not finite", "run again"),
    ),
    "rollback": Kind(
        strike=strike_kill, inject="noise", reference="rollback", weight=2,
        flags=("--config.rollback.at_most=2",),
    ),
    "rise": Kind(
        inject="noise", codes=(3,), must_stop=True, words=("above its best", "rollback"),
        rerun_flags=("--config.resume_step=9",),
    ),
}  # fmt: skip
