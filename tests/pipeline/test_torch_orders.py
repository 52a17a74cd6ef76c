"""Zero-bubble schedules have the orders of PyTorch (extra `hf`, for torch)."""

import pytest

from llmx.pipeline import schedule, schedules
from llmx.pipeline.schedule import BACKWARD, FORWARD, WEIGHT

torch = pytest.importorskip(
    "torch.distributed.pipelining.schedules", reason="the schedules of torch: extra `hf`"
)

CLASSES = {
    "zb_h1": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dual_pipe_v": "ScheduleDualPipeV",
}


def orders_of_torch(name: str, P: int, M: int) -> list[list[schedule.Operation]]:
    """The operations of each rank; of what overlaps, one after the other."""
    kinds = {
        torch.FORWARD: [FORWARD],
        torch.BACKWARD_INPUT: [BACKWARD],
        torch.BACKWARD_WEIGHT: [WEIGHT],
        torch.FULL_BACKWARD: [BACKWARD, WEIGHT],
    }

    def operations(action):
        if action is None:
            return
        for part in action.sub_actions or ():
            yield from operations(part)
        for kind in kinds.get(action.computation_type, ()):
            yield kind, action.microbatch_index, action.stage_index

    made = object.__new__(getattr(torch, CLASSES[name]))  # without process groups
    made.pp_group_size, made._n_microbatches = P, M
    made.n_local_stages = 1 if name == "zb_h1" else 2
    made.num_stages = made._num_stages = P * made.n_local_stages
    made.number_of_rounds = max(1, M // P)
    made.microbatches_per_round = M // made.number_of_rounds
    ranks = map(made._calculate_single_rank_operations, range(P))
    return [[each for action in rank for each in operations(action)] for rank in ranks]


def refused_by_torch(name: str, P: int, M: int) -> bool:
    return M < 2 * P if name == "dual_pipe_v" else name == "zb_h1" and M % (M // P) > 0


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("P", range(2, 9))
def test_orders_are_those_of_torch(name, P):
    for M in range(P, 4 * P + 1):
        if refused_by_torch(name, P, M):
            continue
        table, theirs = schedules.SCHEDULES[name](P, M), orders_of_torch(name, P, M)
        ours = [[] for _ in range(P)]
        for _, stage, operation in table.operations():
            ours[stage].append(operation)
        assert ours == theirs
        # Every operation as soon as it can: a table of the same orders has as many ticks.
        assert table.num_ticks == schedule.schedule_asap(name, theirs).num_ticks
