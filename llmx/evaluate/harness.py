"""Tasks of lm-evaluation-harness with a run as the model.

    python -m llmx.evaluate.harness --model_args workdir=runs/mine --tasks arc_easy,hellaswag
    python -m llmx.evaluate.harness --model_args workdir=runs/mine,max_length=2048 \\
        --tasks gsm8k --apply_chat_template --batch_size 16

The command is the harness's own, `lm_eval`, with the model `llmx` registered and chosen: all its
arguments are there, `ls tasks` too. Those of `--model_args` are of `harness_model.LlmxLM`.
"""

import os
import sys
import traceback
from collections.abc import Sequence

from llmx.runtime import exits, printable

if __name__ == "__main__":
    exits.silent_interrupts()

# Where the harness looks at its arguments.
OF_ARGUMENTS = ("lm_eval.config", "lm_eval._cli", "lm_eval.evaluator")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the harness. Exit code: 0 done, 2 where the input is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from lm_eval.__main__ import cli_evaluate

        from llmx.data import transient
        from llmx.evaluate import harness_model
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("llmx"):
            raise
        printable.error(
            f"lm-evaluation-harness is not here ({error.name}): pip install 'lm-eval>=0.4.13'"
        )
        return exits.REFUSED
    command = [words.pop(0)] if words[:1] in (["run"], ["ls"], ["validate"]) else ["run"]
    named = any(word.partition("=")[0] in ("--model", "-M", "--config", "-C") for word in words)
    if command == ["run"] and not named:
        words = ["--model", "llmx", *words]
    before, sys.argv = sys.argv, ["llmx harness", *command, *words]
    try:
        cli_evaluate()
    except harness_model.Refused as error:
        printable.error(transient.told(error))
        return transient.exit_code(error)
    except ValueError as error:
        if not _of_arguments(error):
            raise
        printable.error(error)
        return exits.REFUSED
    finally:
        sys.argv = before
    return exits.DONE


def _of_arguments(error: ValueError) -> bool:
    """Whether the harness refused its arguments: tasks that it does not know, and so on."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals["__name__"].startswith(OF_ARGUMENTS)


if __name__ == "__main__":
    sys.exit(main())
