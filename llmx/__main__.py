"""The console command: `llmx train ...` runs `python -m llmx.train ...`, in this process.

Arguments, exit codes and signals are those of the module.
"""

import difflib
import os
import runpy
import sys
from collections.abc import Sequence

import llmx
from llmx.runtime import exits, printable

COMMANDS = {
    "train": ("llmx.train", "train a model, or continue a run"),
    "generate": ("llmx.generate", "continue a prompt, or a conversation, with a run"),
    "evaluate": ("llmx.evaluate", "loss of a run on held-out or other text; right answers"),
    "harness": ("llmx.evaluate.harness", "tasks of lm-evaluation-harness, of a run"),
    "data": ("llmx.data", "make token shards of text; train a tokenizer"),
    "convert": ("llmx.convert", "import from and export to Hugging Face"),
    "compress": ("llmx.compress", "make a smaller run of a trained one, by a recipe"),
    "report": ("llmx.report", "compare runs on one HTML page"),
    "metrics": ("llmx.metrics", "draw the loss of a run"),
    "checkpoint": ("llmx.checkpoint", "list, verify, compare, export and remove checkpoints"),
    "tables": ("llmx.tables", "export sparse tables, whole or what has changed"),
    "history": ("llmx.config.history", "starts of a run, changes of its config, rollbacks"),
    "plan": ("llmx.plan", "memory, bytes sent and time of a step, before anything runs"),
    "aot": ("llmx.aot", "compile for accelerators that are not here"),
    "supervise": ("llmx.runtime.supervisor", "start a command again after crashes and hangs"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the module of the command that the first argument names, as `python -m` does."""
    exits.silent_interrupts()
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("--help", "-h", "help"):
        exits.show(_help())
        return 0
    if name == "--version":
        exits.show(f"llmx {llmx.__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(COMMANDS)}"
        printable.to_stderr(f"llmx: {name!r} is not a command: {hint}")
        return exits.REFUSED
    module = COMMANDS[name][0]
    sys.argv = [f"llmx {name}", *rest]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # as `python -m`: config files may import what stands beside them
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join([
        "usage: llmx COMMAND [arguments]     (llmx COMMAND --help describes them)", "", *lines,
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
