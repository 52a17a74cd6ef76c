"""Disturbs runs of two to four processes with faults drawn at random, and checks how each ends.

    python scripts/chaos.py --faults 80 --seed 0 --processes 2,3,4 [--only kill,hang] [--table FILE]

Every fault must end in a completed run whose losses and last checkpoint are those of an undisturbed
run with as many processes, bit for bit; or in a stop with an exit code of llmx.runtime.exits whose
last line names cause and remedy, after which a plain rerun completes with the same losses. No
process may stay silent for longer than the watchdog allows and 30 seconds, and none may be left
behind. Exit code 1, with all logs kept, if any fault ends otherwise.

A fault is a kind (`KINDS`), a moment (a phase of the run, found from the marks that
scripts/chaos_config.py writes, and a delay) and a victim. Disk-full faults mount a small tmpfs and
are skipped, with the reason, where that is not allowed.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version

import chaos_config
import chaos_faults as faults
import numpy as np
from chaos_config import BATCHES
from chaos_faults import AGAIN, HALF, KINDS, STEPPED, Missed, Violation, kill

ROOT = faults.ROOT
# Compiles ten times as fast; jax 0.12 no longer knows the second flag.
QUICK_COMPILER = os.environ.get("XLA_FLAGS") or " ".join([
    "--xla_backend_optimization_level=0",
    *(["--xla_cpu_use_fusion_emitters=false"] if version("jax").startswith("0.10.") else []),
])  # fmt: skip
LAUNCHES = 4  # of one case at most
FIRST = (0.0, "start", -1, 0)  # before the first mark
SUPERVISOR = "--backoff 0.5 --max-restarts 5 --stopped-limit 20"
GRACE = 30  # seconds that nothing may begin, beyond the watchdog's limit, before a case is hung


# --------------------------------------------------------------------------------- one launch


class Launch:
    """A cluster on this machine, and what is seen of it from outside."""

    def __init__(self, case: "Case", *, flags: tuple[str, ...] = (), inject: bool = False):
        self.case, self.begun = case, time.time()
        orders = case.orders if inject else dataclasses.replace(case.orders, inject="", victim=-1)
        self.log = case.folder / f"log.{len(list(case.folder.glob('log.*')))}"
        command = [
            sys.executable, "scripts/local_cluster.py", "-n", str(case.num),
            f"--supervise={SUPERVISOR}", "--", sys.executable, "-m", "llmx.train", "--config",
            "scripts/chaos_config.py", "--workdir", str(case.workdir), *flags,
        ]  # fmt: skip
        surroundings = os.environ | {
            "LLMX_CHAOS": json.dumps(dataclasses.asdict(orders)), "JAX_PLATFORMS": "cpu",
            "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK_COMPILER,
        }  # fmt: skip
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=surroundings, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def marks(self, number: int) -> list[tuple[float, str, int, int]]:
        """(time, phase, step, process id) of process `number` in this launch."""
        path = self.case.folder / f"marks.{number}"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        found = [(float(t), name, int(step), int(pid)) for t, name, step, pid in rows]
        return [row for row in found if row[0] >= self.begun]

    def trainer(self, number: int) -> int:
        """The process id of trainer `number`, which is the newest that left a mark."""
        return self.marks(number)[-1][3]

    def wait_for(self, phase: str, step: int, number: int) -> None:
        """Returns when process `number` is in this phase; Missed if it never is."""
        while self.process.poll() is None:
            seen = [(name, at) for _, name, at, _ in self.marks(number)]
            if any(name == phase and at >= step for name, at in seen):
                return
            self._check_silence()
            time.sleep(0.01)
        raise Missed(f"ended before {phase}")

    def end(self) -> int:
        """The exit code; Violation if it hangs."""
        while self.process.poll() is None:
            self._check_silence()
            time.sleep(0.02)
        return self.process.returncode

    def _check_silence(self) -> None:
        last = max(marks[-1] for n in range(self.case.num) if (marks := self.marks(n) or [FIRST]))
        measured = last[1] in STEPPED and last[2] > HALF + 4
        limit = chaos_config.STEP_LIMIT if measured else chaos_config.START_LIMIT
        silent = time.time() - max(self.begun, last[0])
        if silent > limit + GRACE:
            raise Violation(f"hangs: no process began anything for {silent:.0f} s, last {last}")

    def last_line(self) -> str:
        """The last line of the log that is not empty."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else ""


# ---------------------------------------------------------------------------------- one case


@dataclasses.dataclass
class Case:
    """One fault: what, when, where, and the folder that holds all of it."""

    session: "Session"
    index: int
    name: str
    num: int
    phase: str
    victim: int
    step: int
    delay: float
    random: random.Random

    def __post_init__(self):
        self.kind = KINDS[self.name]
        self.folder = self.session.folder / f"{self.index:03d}-{self.name}"
        self.workdir = self.folder / "run"
        self.folder.mkdir(parents=True)
        inject, in_all = self.kind.inject, self.kind.inject in ("", "noise")
        self.orders = chaos_config.Orders(
            str(self.folder), str(self.session.folder / "text"), str(self.session.folder),
            victim=-1 if in_all else self.victim, inject=inject, step=self.step,
        )  # fmt: skip
        self.checks: list[Callable[[], None]] = []  # what a strike wants to see at the end

    def newest(self) -> pathlib.Path:
        """The newest checkpoint."""
        found = (self.workdir / "checkpoints").iterdir()
        return max((p for p in found if p.name.isdecimal()), key=lambda p: int(p.name))

    def run(self) -> str:
        """How the fault ended; Violation if it ended otherwise than it must."""
        kind = self.kind
        if kind.half or self.phase == "restore":
            self.session.copy_half(self.num, self.workdir)
        if kind.prepare:
            kind.prepare(self)
        begun, how = time.monotonic(), []
        flags = tuple(flag.format(folder=self.folder) for flag in kind.flags)
        launch = Launch(self, flags=flags, inject=True)
        try:
            if kind.strike:
                launch.wait_for(self.phase, self.step if self.phase in STEPPED else -1, self.victim)
                time.sleep(self.delay)
                kind.strike(self, launch)
            code = launch.end()
            self._no_process_left()
            for check in self.checks:
                check()
            while code != 0:
                how.append(self._stopped(launch, code, time.monotonic() - begun))
                if kind.mend:
                    kind.mend(self)
                if len(how) == LAUNCHES:
                    raise Violation(f"not done after {LAUNCHES} launches")
                launch = Launch(self, flags=kind.rerun_flags)
                code = launch.end()
                self._no_process_left()
        except BaseException:
            launch.process.poll() is None and launch.process.kill()
            raise
        finally:
            self.kill_all()
        if kind.must_stop and not how:
            raise Violation("was not noticed: the run went to its end")
        undisturbed = self.session.undisturbed(self.num, kind.reference)
        if difference := self.session.differences(self.workdir, undisturbed):
            raise Violation(difference)
        return ", ".join([*how, "rerun completed" if how else "completed"])

    def _stopped(self, launch: Launch, code: int, seconds: float) -> str:
        kind, last = self.kind, launch.last_line()
        text = launch.log.read_text(errors="replace")
        if "Traceback (most recent call last)" in text and not kind.killed:
            raise Violation(f"a traceback, exit {code}")
        if kind.killed and code in (-9, 137, *AGAIN):
            return f"exit {code}"
        if code not in kind.codes:
            raise Violation(f"exit {code} is not in {kind.codes}: {last[:200]}")
        for words in ("again",) if code in AGAIN else kind.words:
            if not re.search(words, last):
                raise Violation(f"the last line lacks {words!r}: {last[:300]}")
        return f"exit {code} in {seconds:.0f} s: {last[:90]}"

    def processes(self) -> list[int]:
        """Processes of this case that are still there."""
        mark, found = str(self.folder).encode(), []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            try:
                ours = mark + b'"' in path.read_bytes()
            except OSError:
                continue
            if ours:
                found.append(int(path.parent.name))
        return found

    def _no_process_left(self) -> None:
        deadline = time.monotonic() + 5
        while left := self.processes():
            if time.monotonic() > deadline:
                raise Violation(f"{len(left)} processes are left behind")
            time.sleep(0.05)

    def kill_all(self) -> None:
        """Kills what is left of this case."""
        for pid in self.processes():
            kill(pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------ session


class Session:
    """All cases, the undisturbed runs that they are compared with, and the table."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.cases: list[Case] = []
        self.mounts: list[pathlib.Path] = []
        for name, seed in (("text", 0), ("other_text", 1)):
            self._write_text(folder / name, np.random.default_rng(seed))

    def _write_text(self, folder: pathlib.Path, generator: np.random.Generator) -> None:
        folder.mkdir(parents=True)
        words = ["alpha", "beta", "gamma", "delta", "def", "return", "import", "x", "=", "+", "\n"]
        for number in range(40):
            (folder / f"{number}.txt").write_text(" ".join(generator.choice(words, 300)))

    def undisturbed(self, num: int, name: str = "") -> pathlib.Path:
        """The work directory of a run that nothing disturbs, with all its checkpoints.

        name: a kind of fault, for a run that goes the same way without being killed.
        """
        return self.folder / f"undisturbed-{num}{name}" / "run"

    def make_undisturbed(self, num: int, name: str = "") -> float:
        """Makes it; its seconds."""
        case = Case(self, 0, name or "none", num, "", -1, 0, 0.0, random.Random(0))
        case.folder.rename(self.undisturbed(num, name).parent)
        case.workdir = self.undisturbed(num, name)
        case.folder = case.workdir.parent
        case.orders = dataclasses.replace(case.orders, folder=str(case.folder), victim=-1)
        every = chaos_config.SAVE_EVERY
        flags = (f"--config.checkpoint.keep_every={every}", *case.kind.flags)
        launch = Launch(case, flags=flags, inject=True)
        if code := launch.end():
            raise Violation(f"the undisturbed run ends with {code}: {launch.log.read_text()}")
        return time.time() - launch.begun

    def copy_half(self, num: int, workdir: pathlib.Path) -> None:
        """A copy of the undisturbed run as it was after `HALF` steps."""
        shutil.copytree(self.undisturbed(num), workdir)
        for path in (workdir / "checkpoints").iterdir():
            if not path.name.isdecimal() or int(path.name) > HALF:
                shutil.rmtree(path)

    def differences(self, workdir: pathlib.Path, undisturbed: pathlib.Path) -> str:
        """How a run differs from the undisturbed one; "" if it does not."""
        for kind in ("train", "eval"):
            wanted = _losses(undisturbed, kind)
            found = _losses(workdir, kind)
            if [step for step, *_ in found] != [step for step, *_ in wanted]:
                return f"{kind} records of steps {[step for step, *_ in found]}"
            for one, other in zip(found, wanted, strict=True):
                if one != other:
                    return f"step {one[0]}: {one[1:]} instead of {other[1:]}"
        last = f"checkpoints/{chaos_config.STEPS}/meta/metadata"
        paths = [folder / last for folder in (workdir, undisturbed)]
        if not paths[0].exists():
            return "no last checkpoint"
        one, other = (json.loads(path.read_text())["document"]["leaves"] for path in paths)
        different = [name for name in other if one.get(name) != other[name]]
        return f"the last checkpoint differs in {different[:3]}" if different else ""

    def close(self) -> None:
        """Ends what is left of the cases, and their mounts."""
        for case in self.cases:
            case.kill_all()
        for path in self.mounts:
            subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)


def _losses(workdir: pathlib.Path, kind: str) -> list[tuple]:
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    found = [record for line in lines if (record := json.loads(line))["kind"] == kind]
    return [(r["step"], r["loss"], r.get("grad_norm"), r.get("learning_rate")) for r in found]


def draw(session: Session, options: argparse.Namespace) -> list[Case]:
    """The cases: each kind once, then by weight, in random order."""
    generator = random.Random(options.seed)
    names = [
        name for name in KINDS if name != "none" and (not options.only or name in options.only)
    ]
    weights = [KINDS[name].weight for name in names]
    drawn = (names + generator.choices(names, weights, k=options.faults))[: options.faults]
    generator.shuffle(drawn)
    cases = []
    for index, name in enumerate(drawn, start=1):
        num, phase = generator.choice(options.processes), generator.choice(KINDS[name].phases)
        if KINDS[name].reference:
            num = min(options.processes)  # it needs an undisturbed run of its own
        case = dict(
            num=num, phase=phase, victim=generator.randrange(num),
            step=generator.randrange(HALF + 1 if KINDS[name].half else 2, chaos_config.STEPS - 6),
            delay=generator.random() ** 2 * (0.5 if phase == "save" else 1.0),
            random=random.Random(generator.random()),
        )  # fmt: skip
        cases.append(Case(session, index, name, **case))
    return cases


def judge(case: Case) -> tuple[str, str, float]:
    """("ok" | "missed" | "VIOLATION", how it ended, seconds)."""
    begun = time.monotonic()
    try:
        verdict, text = "ok", case.run()
    except Missed as missed:
        verdict, text = "missed", str(missed)
    except Violation as violation:
        verdict, text = "VIOLATION", f"{violation} (logs: {case.folder})"
    except Exception as error:
        traceback.print_exc()
        verdict, text = "VIOLATION", f"{error!r} (logs: {case.folder})"
    return verdict, text, time.monotonic() - begun


def row(case: Case, verdict: str, text: str, seconds: float) -> str:
    """A row of the table."""
    if case.kind.strike:
        at = f" {case.step}" if case.phase in STEPPED else ""
        moment = f"{case.phase}{at} + {case.delay:.2f} s"
    else:
        moment = f"step {case.step}" if case.kind.inject in BATCHES else "before the launch"
    return (
        f"| {case.index} | {case.name} | {case.victim} of {case.num} | {moment} | "
        f"{verdict} | {text.replace('|', '/')} | {seconds:.0f} |"
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--faults", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=numbers, default=[2, 3, 4], help="e.g. 2,3,4")
    parser.add_argument("--only", type=lambda text: text.split(","), help="kinds of faults")
    parser.add_argument("--table", type=pathlib.Path, help="write the table here too")
    parser.add_argument("--jobs", type=int, default=1, help="cases at the same time")
    parser.add_argument("--folder", type=pathlib.Path, help="of all runs; default: a temporary one")
    options = parser.parse_args(argv)
    for name in options.only or ():
        if name not in KINDS:
            parser.error(f"--only {name}: there is {', '.join(KINDS)}")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    session = Session(options.folder or pathlib.Path(tempfile.mkdtemp(prefix="llmx-chaos-")))
    lines = ["| | fault | victim | moment | | how it ended | seconds |", "|" + "---|" * 7]

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)
        if options.table:
            options.table.write_text("\n".join(lines) + "\n")

    print(f"folder: {session.folder}\n" + "\n".join(lines), flush=True)
    begun, verdicts = time.monotonic(), []
    try:
        session.cases += draw(session, options)
        references = {(case.num, case.kind.reference) for case in session.cases}
        references = sorted(references | {(case.num, "") for case in session.cases})
        for num, name in references:
            seconds = session.make_undisturbed(num, name)
            print(f"undisturbed, {num} processes {name}: {seconds:.0f} s", flush=True)
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            running = {pool.submit(judge, case): case for case in session.cases}
            try:
                for done in concurrent.futures.as_completed(running):
                    verdicts.append(done.result()[0])
                    say(row(running[done], *done.result()))
            except BaseException:  # Ctrl-C: only the cases under way are waited for
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        session.close()
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("ok", "missed", "VIOLATION"))
    say(f"\n{len(verdicts)} faults in {(time.monotonic() - begun) / 60:.0f} min: {counts}")
    bad = "VIOLATION" in verdicts
    if not bad and options.folder is None:
        shutil.rmtree(session.folder)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
