"""Counts the lines of code that a reader meets on the path of one plain step on one device.

    python scripts/count_path.py

The path is the story in `train.py`, the recipe, and every file from which a step of the quickstart
calls a function between the batch and the updated parameters. One step is traced to find them, so
the list is measured: of `PATH` the whole file counts, of the other files that the step calls only
the functions that it calls, which are printed apart. Lines of code are those without blanks,
comments and docstrings. Exit code 1 if `PATH` has more than `LIMIT` of them.
"""

import argparse
import ast
import collections
import io
import os
import pathlib
import random
import sys
import tempfile
import threading
import tokenize

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "llmx"
LIMIT = 1600

# The reading order. With the kernel that is the reference, not with the fastest.
PATH = (
    "train.py", "config/recipe.py", "contract.py", "step/step.py", "step/gradients.py",
    "model/training_loss.py", "model/apply.py", "model/layers.py", "model/decoder.py",
    "model/dot.py", "model/losses.py", "model/attention/attend.py",
    "model/attention/reference.py", "step/optimizers.py",
)  # fmt: skip
FLAGS = (
    "--config", str(ROOT / "configs" / "quickstart.py"), "--config.steps=1",
    "--config.attention.implementation=reference", "--config.sample.prompt=",
    "--config.metrics.progress=off", "--config.metrics.plot_every=0",
    "--config.checkpoint.every=0", "--config.evaluation.every=0", "--config.batch.size=2",
    "--config.launch.platform=cpu", "--config.launch.compile_cache=",
)  # fmt: skip

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> set[int]:
    """The numbers of the lines of Python source that are code."""
    lines = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NO_CODE
        for number in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return lines


def called_by_step(flags: tuple[str, ...]) -> dict[str, set[int]]:
    """{file below llmx/: lines of the functions that `train_step` calls}, of a run of one step."""
    called: dict[str, set[int]] = collections.defaultdict(set)
    step_file, depth = str(PACKAGE / "step" / "step.py"), 0

    def profile(frame, event, _):
        nonlocal depth
        code = frame.f_code
        if code.co_name == "train_step" and code.co_filename == step_file:
            depth += {"call": 1, "return": -1}.get(event, 0)
        if event == "call" and depth and code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            numbers = [number for _, _, number in code.co_lines() if number]
            name = pathlib.Path(code.co_filename).relative_to(PACKAGE).as_posix()
            called[name].update(range(code.co_firstlineno, max(numbers) + 1))

    from llmx import train

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        exit_code = train.main(flags)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if exit_code or not called:
        raise SystemExit(f"the traced run failed with exit code {exit_code}: see above")
    return called


def trace() -> dict[str, set[int]]:
    """`called_by_step` of the quickstart on a small text."""
    with tempfile.TemporaryDirectory() as folder:
        words = random.Random(0).choices(("def", "return", "import", "x", "=", "\n"), k=20_000)
        for number in range(40):
            part = words[number * 500 : (number + 1) * 500]
            pathlib.Path(folder, f"{number}.txt").write_text(" ".join(part))
        own = (f"--workdir={folder}/run", f"--config.data.sources=({folder!r},)")
        return called_by_step((*FLAGS, *own, f"--config.data.cache_dir={folder}/cache"))


def main() -> int:
    """Prints the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-trace", action="store_true", help="count the files of the path only")
    args = parser.parse_args()
    called = {} if args.no_trace else trace()
    lines = {
        name: code_lines((PACKAGE / name).read_text())
        for name in dict.fromkeys((*PATH, *sorted(called)))
    }
    print(f"{'file below llmx/':36}{'lines of code':>14}{'called by the step':>20}")
    for name in PATH:
        row = f"{name:36}{len(lines[name]):14}"
        print(row if args.no_trace else f"{row}{len(lines[name] & called.get(name, set())):20}")
    total = sum(len(lines[name]) for name in PATH)
    print(f"{'total':36}{total:14}   of at most {LIMIT:,}")
    others = {name: len(lines[name] & called[name]) for name in sorted(called) if name not in PATH}
    if others:
        print("\nalso called by the step, outside of the path (lines of the functions called):")
        for name, count in others.items():
            print(f"{name:36}{count:14}")
        print(f"{'total':36}{sum(others.values()):14}")
    return 0 if total <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
