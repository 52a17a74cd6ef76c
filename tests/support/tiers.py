"""Which tier runs a test: the default, `slow`, or `--full-grid`.

Three things decide. A test is marked `slow` for what it does: it starts processes, kills them, or
trains for minutes. A case is marked `full_grid` where another takes the same way through the code.
And a test is left out because it takes long: `tests/slow_cases.txt` has those, measured.

    pytest -m "" --full-grid --measure times.tsv   CPU seconds of each test, as they end
    python tests/support/tiers.py times.tsv        writes tests/slow_cases.txt

The list has all tests above LIMIT. Of the cases of one function the shortest stays in the default
tier, or is slow where it takes more than LONGEST; the others run with `--full-grid` only. So
`pytest` alone goes through nearly all functions, and with the slow tier through all but those of
OTHERS_STAND_FOR.
"""

import collections
import os
import pathlib
import re
import sys
from collections.abc import Collection, Iterable, Mapping

import pytest

LIMIT, LONGEST = 1.0, 4.0  # CPU seconds
SLOW, FULL_GRID = "slow", "full_grid"
LISTED = pathlib.Path(__file__).parents[1] / "slow_cases.txt"
# What `pytest` stores where it collects all tests: the names of the list that no test has.
WITHOUT_A_TEST = pytest.StashKey[list[str]]()
_GROUP = re.compile(r"@[^\]]*$")  # of pytest-xdist, behind a name
_LEFT_ALONE = (
    "tests/parity/test_parity.py",  # `parity_grid.quick` chooses
    "tests/checkpoint/test_identity.py",  # each case is of other fields of a model
    "tests/sync/test_replicas.py::test_however_a_replica_is_split",  # or of another strategy
    # These need packages that not every environment has, and so may not exist.
    "tests/checkpoint/test_gguf_file.py", "tests/checkpoint/test_gguf_tokenizer.py",
    "tests/checkpoint/test_hf.py", "tests/checkpoint/test_hf_layers.py",
    "tests/checkpoint/test_hf_packed.py", "tests/checkpoint/test_peft.py",
    "tests/evaluate/test_harness.py", "tests/pipeline/test_torch_orders.py",
)  # fmt: skip


# Long tests, and which shorter ones go through most of the same code. Only with `--full-grid`: what
# a comment says.
OTHERS_STAND_FOR = {
    # The remedies that `aot` tries one after the other.
    "tests/aot/test_aot.py::test_what_fits_is_made_faster":
        "tests/aot/test_budget.py::test_the_search_uses_the_budget",
    # That what the host has is no argument of GPUs.
    "tests/aot/test_aot.py::test_gpus_have_no_moments_that_the_host_has":
        "tests/step/test_offload.py::test_nothing_is_computed_in_host_memory",
    # A mixture compiled for GPUs.
    "tests/aot/test_experts.py::test_gpus_compile_mixtures_in_bf16":
        "tests/aot/test_experts.py::test_rows_travel_beside_other_work_and_kernels_multiply_them",
    # Bytes of gathers in fp8.
    "tests/aot/test_layout_bytes.py::test_weights_gathered_in_fp8_are_half_the_bytes":
        "tests/aot/test_layout_bytes.py::test_h100_multiplies_fp8_in_its_fp8_units",
    # A config file as it stands, by the script that compiles all.
    "tests/config/test_config_files.py::test_it_compiles_and_fits":
        "tests/aot/test_aot.py::test_every_family_compiles",
    # A run of integers with stages in its checkpoint.
    "tests/checkpoint/test_quantized.py::test_resumed_on_another_mesh":
        "tests/end_to_end/test_quantized_runs.py::test_codes_are_restored_on_every_mesh",
    # In four stages.
    "tests/checkpoint/test_reshard.py::test_a_run_goes_on_where_it_was":
        "tests/checkpoint/test_reshard.py::test_a_run_goes_on_elsewhere",
    # Integers in a command that is killed.
    "tests/end_to_end/test_pruning.py::test_integers_killed_and_resumed_elsewhere":
        "tests/end_to_end/test_pruning.py::test_killed_and_resumed_elsewhere",
    # Going back by hand.
    "tests/end_to_end/test_rollback.py::test_without_rollbacks_it_stops_and_goes_back_by_hand":
        "tests/end_to_end/test_rollback.py::test_a_run_goes_back_by_itself",
    # Tables that nothing is late for, and with a cache.
    "tests/end_to_end/test_tables.py::test_a_killed_run_goes_on_on_other_devices":
        "tests/tables/test_late_training.py::"
        "test_a_late_run_goes_on_bit_for_bit_and_on_other_devices",
    "tests/tables/test_cached_training.py::"
    "test_a_run_goes_on_bit_for_bit_on_other_devices_with_another_cache":
        "tests/tables/test_late_training.py::"
        "test_a_late_run_goes_on_bit_for_bit_and_on_other_devices",
    "tests/tables/test_training.py::test_a_run_goes_on_bit_for_bit_and_on_other_devices":
        "tests/tables/test_late_training.py::"
        "test_a_late_run_goes_on_bit_for_bit_and_on_other_devices",
    # The commands that evaluate and generate from such a run.
    "tests/end_to_end/test_train.py::test_a_run_with_the_optimizer_in_host_memory":
        "tests/step/test_offload.py::test_it_is_restored_to_where_the_run_keeps_it",
    # The command's own words.
    "tests/end_to_end/test_train.py::test_another_strategy_in_the_middle_is_refused":
        "tests/checkpoint/test_resume.py::test_another_strategy_is_refused_and_the_checkpoint_left",
    # A strategy's state in a command that is killed.
    "tests/end_to_end/test_train.py::test_killed_replicas_go_on_as_if_nothing_had_been":
        "tests/end_to_end/test_train.py::test_kill_and_resume",
    "tests/model/test_distillation.py::test_lists_train_alike_on_meshes":
        "tests/model/test_distillation.py::test_meshes_train_alike",
    # Latent attention.
    "tests/model/test_distillation.py::test_relations_of_latent_attention_and_repeated_layers":
        "tests/model/test_distillation.py::test_relations_train_alike_on_meshes",
    # Slices: that an exchange beside a step is hidden between them.
    "tests/sync/test_bytes.py::test_an_exchange_beside_a_step_is_hidden_between_slices":
        "tests/aot/test_layout_bytes.py::test_reductions_run_beside_compute",
}  # fmt: skip


def full_grid(*values):
    """A case that runs with `--full-grid` only: another takes the same way through the code."""
    return pytest.param(*values, marks=pytest.mark.full_grid)


def by_tier(cases: Iterable[str], *, slow: Collection[str], full: Collection[str]) -> list:
    """Cases by name, those of `slow` and `full` with their marks."""

    def one(case: str):
        if case in full:
            return full_grid(case)
        return pytest.param(case, marks=[pytest.mark.slow] * (case in slow))

    return [one(case) for case in cases]


def mark_listed(items: Iterable[pytest.Item]) -> list[str]:
    """Marks the tests of `LISTED` and of OTHERS_STAND_FOR. Returns the names of both that none of
    `items` has, or for what stands for others none that runs."""
    listed, functions, run = read_list(), set(), set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        functions.add(function)
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)
        if function in OTHERS_STAND_FOR or listed.get(item.nodeid) == FULL_GRID:
            item.add_marker(pytest.mark.full_grid)
        if not item.get_closest_marker(FULL_GRID):
            run.add(function)
    # What stands for others has a case that runs without `--full-grid`.
    missing = (OTHERS_STAND_FOR.keys() - functions) | (set(OTHERS_STAND_FOR.values()) - run)
    return sorted(missing | (listed.keys() - {item.nodeid for item in items}))


def group_by_file(items: Iterable[pytest.Item]) -> None:
    """Gives tests without a group that of their file: its fixtures, and programs that it keeps, are
    then made by one worker. Where a file takes minutes, put `xdist_group` on its tests, by what
    they share: a run takes no less than its longest group."""
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def read_list() -> dict[str, str]:
    """The tests of `LISTED`, each with its tier."""
    lines = [line.split("\t") for line in LISTED.read_text().splitlines()]
    return {name: tier for tier, name in lines}


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def left_out(seconds: Mapping[str, float]) -> dict[str, str]:
    """The tests that `pytest` alone leaves out because of their CPU seconds, each with its tier."""
    functions = collections.defaultdict(list)
    for name in seconds:
        functions[name.partition("[")[0]].append(name)
    shortest = {min(cases, key=lambda name: seconds[name]) for cases in functions.values()}
    found = {}
    for name in sorted(seconds):
        if seconds[name] <= LIMIT or name.startswith(_LEFT_ALONE):
            continue
        if name not in shortest:
            found[name] = FULL_GRID
        elif seconds[name] > LONGEST:
            found[name] = SLOW
    return found


def main(path: str) -> None:
    lines = [line.split("\t") for line in pathlib.Path(path).read_text().splitlines()]
    seconds = {_GROUP.sub("", name): float(of) for of, name in lines}
    found = left_out(seconds)
    LISTED.write_text("".join(f"{tier}\t{name}\n" for name, tier in found.items()))
    left = sum(seconds.values()) - sum(seconds[name] for name in found)
    print(f"{len(found)} of {len(seconds)} tests are left out; the others take {left:.0f} seconds")


if __name__ == "__main__":
    main(*sys.argv[1:])
