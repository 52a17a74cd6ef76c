"""Compiles every config of configs/ for the machines in its docstring.

    python scripts/compile_configs.py [NAME ...]

A docstring names a machine by its line `python -m llmx.aot --config configs/NAME.py --topology
TOPOLOGY`. Each is compiled in its own process and printed as one line. Exit code 1 if one does not
compile or does not fit.
"""

import argparse
import ast
import json
import pathlib
import re
import subprocess
import sys

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
GIB = 2**30


def topologies_of(path: pathlib.Path) -> list[str]:
    """The topologies in the docstring of a config file."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return re.findall(rf"-m llmx\.aot --config configs/{path.stem}\.py --topology (\S+)", text)


def main() -> int:
    command = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command.add_argument("names", nargs="*", metavar="NAME", help="configs; all by default")
    args = command.parse_args()
    known = {path.stem: path for path in sorted(CONFIGS.glob("*.py"))}
    if unknown := set(args.names) - set(known):
        command.error(f"unknown config {sorted(unknown)}: use one of {', '.join(known)}")
    good = True
    for name in args.names or known:
        for topology in topologies_of(known[name]):
            done = subprocess.run(
                [sys.executable, "-m", "llmx.aot", "--config", str(known[name]),
                 "--topology", topology, "--json", "--config.start_from=",
                 "--config.distillation.teacher="],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            good &= done.returncode == 0
            print(f"{name:12s} {topology:10s} {_outcome(done)}", flush=True)
    return 0 if good else 1


def _outcome(done: subprocess.CompletedProcess) -> str:
    if done.returncode not in (0, 1):
        return f"exit {done.returncode}: {done.stderr.strip()}"
    report = json.loads(done.stdout)
    memory = report["memory"]
    verdict = "fits" if done.returncode == 0 else "DOES NOT FIT"
    return (
        f"{verdict}: peak {memory['peak'] / GIB:.2f} of {memory['limit'] / GIB:.2f} GiB, "
        f"compiled in {report['seconds']['compile']:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
