"""Trains a student of a quarter of quickstart's parameters alone, and with quickstart as teacher.

    python -m llmx.train --config configs/quickstart.py
    python scripts/compare_distillation.py                        # all rows
    python scripts/compare_distillation.py alone forward

All rows have the same model, seed, rows of text and number of steps; the loss is that of the
held-out split, of the data alone. Runs are kept in --folder; a killed command goes on. Add a row:
it is a name in RUNS.
"""

import argparse
import json
import os
import subprocess
import sys

CONFIG = "configs/quickstart_distill.py"
# By name: keys of the config.
RUNS = {
    "alone": {"distillation.teacher": ""},
    "forward": {},
    "half": {"distillation.weight": 0.5},
    "warm": {"distillation.temperature": 2.0},
    "reverse": {"distillation.divergence": "reverse"},
    "layers": {"distillation.hidden_weight": 0.1},
    "attention": {"distillation.attention_weight": 1.0},
}


def held_out(name: str, args: argparse.Namespace) -> float:
    """The held-out loss of a row after its last step."""
    workdir = os.path.join(args.folder, name)
    keys = {"steps": args.steps, "batch.size": args.batch, "evaluation.every": 0,
            "evaluation.batches": 0, "sample.prompt": ""}  # fmt: skip
    teacher = {"distillation.teacher": args.teacher}
    flags = [f"--config.{key}={value}" for key, value in (keys | teacher | RUNS[name]).items()]
    command = ["-m", "llmx.train", "--config", CONFIG, "--workdir", workdir]
    subprocess.run([sys.executable, *command, *flags, *args.extra], check=True)
    with open(os.path.join(workdir, "metrics.jsonl")) as file:
        records = [json.loads(line) for line in file]
    return [record for record in records if record["kind"] == "eval"][-1]["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--teacher", default="runs/quickstart", help="of all rows but alone")
    parser.add_argument("--folder", default="runs/compare_distillation", help="of the new runs")
    parser.add_argument("--steps", type=int, default=300, help="of each row (300)")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step (16)")
    args, args.extra = parser.parse_known_args()  # others are flags of llmx.train
    if wrong := sorted(set(args.names) - set(RUNS)):
        parser.error(f"{wrong[0]!r} is unknown: use some of {', '.join(RUNS)}")
    found = {name: held_out(name, args) for name in args.names or RUNS}
    alone = found.get("alone")
    print("| student | held-out loss | to alone |")
    print("| --- | --- | --- |")
    for name, loss in found.items():
        change = f"{loss / alone - 1:+.2%}" if alone else ""
        print(f"| {name} | {loss:.4f} | {change} |")


if __name__ == "__main__":
    main()
