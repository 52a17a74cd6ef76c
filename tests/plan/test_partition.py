"""partition.py: the best partition is the one that trying all of them finds."""

import dataclasses
import itertools
import math
import random
import time

import pytest

from llmx.model import costs
from llmx.model.families import preset
from llmx.plan import layer_times, partition
from llmx.plan.partition import Layer, Pipeline, describe, layers_of, to_counts

GIB = 2**30
FAST = math.inf  # bytes/s
# Sums of floats in another order.
TOLERANCE = 1e-9
NUM_CASES = 900
LARGE_SECONDS = 10.0  # of a processor; 2 s on an idle machine


def layer(seconds: float = 3.0, **changes) -> Layer:
    """A third of the time forward; nothing to keep or send."""
    figures = dict(name="layer", forward=seconds / 3, backward=seconds * 2 / 3, weight_bytes=0,
                   state_bytes=0, version_bytes=0, output_bytes=0, stash_bytes=0)  # fmt: skip
    return Layer(**figures | changes)


def pipeline_of(options: dict) -> tuple[Pipeline, dict]:
    """The pipeline of some options, and the other options."""
    names = {field.name for field in dataclasses.fields(Pipeline)}
    ours = {name: value for name, value in options.items() if name in names}
    others = {name: value for name, value in options.items() if name not in names}
    return Pipeline(**ours), others


def split(layers, num_devices, **changes) -> partition.Partition:
    pipeline, options = pipeline_of(dict(bandwidth=FAST, microbatches=8) | changes)
    return partition.partition(layers, num_devices, pipeline, **options)


def boundaries(found: partition.Partition) -> list[tuple[int, int, int]]:
    return [(stage.first, stage.stop, stage.replicas) for stage in found.stages]


# -------------------------------------------------------------------- against trying all partitions

# By stages behind and microbatches of a step, as the module says in words.
IN_FLIGHT = {
    "gpipe": lambda later, M: M,
    "1f1b": lambda later, M: min(1 + later + later, M),
    "1f1b_unflushed": lambda later, M: 1 + later + later,
    "asynchronous": lambda later, M: 1 + later,
}


@dataclasses.dataclass(frozen=True)
class Case:
    layers: list[Layer]
    num_devices: int
    options: dict


def random_case(seed: int) -> Case:
    """Up to 7 layers on up to 5 devices; whole numbers, which tie often, in every other case."""
    draw = random.Random(seed)
    number = (
        (lambda most: draw.randint(0, most)) if seed % 2 else (lambda most: draw.random() * most)
    )
    num_layers = max(draw.randint(1, 7), draw.randint(1, 7))
    num_devices = max(draw.randint(1, 5), draw.randint(1, 5))
    layers = [
        Layer(
            name=f"layer {n}", forward=float(number(4)), backward=float(number(8)),
            weight_bytes=draw.randint(0, 6), state_bytes=draw.randint(0, 40),
            version_bytes=draw.randint(0, 10), output_bytes=draw.randint(0, 6),
            stash_bytes=draw.randint(0, 10),
        )
        for n in range(num_layers)
    ]  # fmt: skip
    most = min(num_layers, num_devices)
    options = dict(
        bandwidth=draw.choice([0.5, 1.0, 4.0, FAST]),
        microbatches=draw.choice([1, 2, 8]),
        memory_bytes=draw.choice([None, 40, 70, 100, 150]),
        num_stages=draw.choice([None, None, draw.randint(1, most)]),
        replicate=draw.random() < 0.8,
        versions=draw.choice([1, 2, None]),
        in_flight=draw.choice(list(IN_FLIGHT)),
    )
    return Case(layers, num_devices, options)


def figures(case: Case, stops: tuple[int, ...], replicas: tuple[int, ...]):
    """Seconds of each stage, seconds of each link, bytes of each stage; term by term."""
    options, M = case.options, case.options["microbatches"]
    seconds, links, memory, first = [], [], [], 0
    for number, (stop, m) in enumerate(zip(stops, replicas, strict=True)):
        chain, later = case.layers[first:stop], len(stops) - 1 - number
        compute = sum(each.forward + each.backward for each in chain) / m
        sent = 2 * (m - 1) / m * sum(each.weight_bytes for each in chain)
        seconds.append(max(compute, sent / options["bandwidth"] / M))
        flying = IN_FLIGHT[options["in_flight"]](later, M)
        kept = flying if options["versions"] is None else options["versions"]
        memory.append(
            sum(each.state_bytes + (kept - 1) * each.version_bytes for each in chain)
            + math.ceil(flying * sum(each.stash_bytes for each in chain) / m)
        )
        if later:
            links.append(2 * case.layers[stop - 1].output_bytes / options["bandwidth"])
        first = stop
    return seconds, links, memory


def all_partitions(case: Case):
    """(stops, replicas) of every partition that the options allow, but for memory."""
    size, most = len(case.layers), case.num_devices
    wanted = case.options["num_stages"]
    for count in range(1, min(size, most) + 1) if wanted is None else [wanted]:
        for inner in itertools.combinations(range(1, size), count - 1):
            for replicas in itertools.product(range(1, most + 1), repeat=count):
                if sum(replicas) <= most and (case.options["replicate"] or max(replicas) == 1):
                    yield (*inner, size), replicas


def brute_force(case: Case, limit: int | None):
    """The first in order of the best, or None; and the least that the fullest stage can hold."""
    possible, least = [], math.inf
    for stops, replicas in all_partitions(case):
        seconds, links, memory = figures(case, stops, replicas)
        least = min(least, max(memory))
        if limit is None or max(memory) <= limit:
            possible.append((
                max(*seconds, *links, 0.0), len(stops), sum(replicas),
                sum(each * each for each in seconds), tuple(zip(stops, replicas, strict=True)),
            ))  # fmt: skip
    for column in range(4):
        lowest = min((each[column] for each in possible), default=0)
        possible = [each for each in possible if each[column] <= lowest * (1 + TOLERANCE)]
    return min(possible, key=lambda each: each[4], default=None), least


@pytest.mark.parametrize(
    "seeds", [range(first, first + 100) for first in range(0, NUM_CASES, 100)], ids=str
)
def test_no_partition_is_better(seeds):
    for seed in seeds:
        case = random_case(seed)
        limit = case.options["memory_bytes"]
        expected, least = brute_force(case, limit)
        if expected is None:
            with pytest.raises(ValueError, match=rf"memory_bytes={limit} .* {least} bytes"):
                split(case.layers, case.num_devices, **case.options)
            continue
        found = split(case.layers, case.num_devices, **case.options)
        pairs = tuple((stage.stop, stage.replicas) for stage in found.stages)
        assert found.seconds == pytest.approx(expected[0], rel=TOLERANCE), seed
        assert pairs == expected[4], seed
        seconds, links, memory = figures(case, *zip(*pairs, strict=True))
        assert [stage.seconds for stage in found.stages] == pytest.approx(seconds, rel=TOLERANCE)
        assert found.links == pytest.approx(links)
        assert [stage.memory_bytes for stage in found.stages] == memory


def test_the_random_cases_are_of_every_kind():
    cases = [random_case(seed) for seed in range(NUM_CASES)]
    limits = [case.options["memory_bytes"] for case in cases]
    bests = [brute_force(case, limit)[0] for case, limit in zip(cases, limits, strict=True)]
    free = [brute_force(case, None)[0] for case in cases]
    assert sum(limit is None for limit in limits) > 100
    assert sum(best is None for best in bests) > 100  # nothing fits
    moved = [best is not None and best != other for best, other in zip(bests, free, strict=True)]
    assert sum(moved) > 100  # the limit changes the partition
    assert sum(best is not None and best[1] > 2 for best in bests) > 100  # several stages
    assert sum(best is not None and best[2] > best[1] > 1 for best in bests) > 100  # and replicas


# --------------------------------------------------------------------------------- what is expected


def test_equal_layers_make_equal_stages():
    found = split([layer()] * 12, 4, num_stages=4)
    assert boundaries(found) == [(0, 3, 1), (3, 6, 1), (6, 9, 1), (9, 12, 1)]
    assert found.seconds == 9.0
    # The rest goes to the last stages, which hold the fewest microbatches.
    uneven = split([layer(0.1)] * 9, 4, num_stages=4)
    assert [stage.num_layers for stage in uneven.stages] == [2, 2, 2, 3]
    # Without a network's cost replicas do as well as stages, and are fewer stages.
    assert boundaries(split([layer()] * 12, 4)) == [(0, 12, 4)]


def test_a_huge_layer_gets_the_replicas():
    chain = [layer(), layer(18.0), layer()]
    assert boundaries(split(chain, 3, num_stages=3)) == [(0, 1, 1), (1, 2, 1), (2, 3, 1)]
    assert boundaries(split(chain, 8, num_stages=3)) == [(0, 1, 1), (1, 2, 6), (2, 3, 1)]
    assert boundaries(split(chain, 100, num_stages=3, replicate=False))[1] == (1, 2, 1)
    # Replicas that exchange for longer than they save are left out.
    cheap = split([layer(1.0), layer(5.0, weight_bytes=10**9)], 8, num_stages=2, bandwidth=1e6)
    assert boundaries(cheap) == [(0, 1, 1), (1, 2, 1)]


def test_a_slow_network_leaves_one_device():
    chain = [layer(output_bytes=100, weight_bytes=100), layer(output_bytes=7, weight_bytes=100)] * 3
    assert boundaries(split(chain, 4, bandwidth=1e-3)) == [(0, 6, 1)]
    # Must there be stages, they meet where least is sent.
    three = split(chain, 4, bandwidth=1e-3, num_stages=3, replicate=False)
    assert boundaries(three) == [(0, 2, 1), (2, 4, 1), (4, 6, 1)]
    smallest = [layer(output_bytes=size) for size in (9, 8, 3, 9, 9, 9)]
    assert boundaries(split(smallest, 2, bandwidth=1e-3, num_stages=2))[0] == (0, 3, 1)


def test_exchange_is_spread_over_microbatches():
    chain = [layer(weight_bytes=90)] * 4
    assert split(chain, 4, bandwidth=1.0, microbatches=1, num_stages=1).num_devices == 1
    found = split(chain, 4, bandwidth=1.0, microbatches=1000, num_stages=1)
    assert (found.num_devices, found.seconds) == (4, 3.0)
    # 2 (m-1)/m W / bandwidth / M, where that is longer than the computation.
    bound = split([layer(1.0, weight_bytes=400)], 2, bandwidth=100.0, microbatches=5)
    assert bound.stages[0].seconds == max(0.5, 2 * (1 / 2) * 400 / 100 / 5)


def test_links_may_be_slowest():
    chain = [layer(output_bytes=50), layer()]
    found = split(chain, 2, bandwidth=10.0, num_stages=2)
    assert (found.links, found.seconds) == ((10.0,), 10.0)


@pytest.mark.parametrize(
    ("in_flight", "microbatches", "flying"),
    [
        ("1f1b", 16, [7, 5, 3, 1]),
        ("1f1b", 4, [4, 4, 3, 1]),
        ("1f1b_unflushed", 4, [7, 5, 3, 1]),
        ("asynchronous", 1, [4, 3, 2, 1]),
        ("gpipe", 16, [16, 16, 16, 16]),
    ],
)
def test_memory_is_state_and_what_is_in_flight(in_flight, microbatches, flying):
    chain = [layer(state_bytes=1000, version_bytes=100, stash_bytes=10)] * 4

    def memory(versions):
        found = split(
            chain, 4, num_stages=4, microbatches=microbatches, in_flight=in_flight,
            versions=versions,
        )  # fmt: skip
        return [stage.memory_bytes for stage in found.stages]

    assert memory(1) == [1000 + 10 * n for n in flying]
    assert memory(2) == [1100 + 10 * n for n in flying]
    assert memory(None) == [1000 + 100 * (n - 1) + 10 * n for n in flying]


def test_replicas_share_a_microbatch():
    found = split([layer(state_bytes=1000, stash_bytes=10)], 4, in_flight="gpipe", microbatches=2)
    assert (found.stages[0].replicas, found.stages[0].memory_bytes) == (4, 1005)


def test_a_limit_moves_layers_back():
    # The first of four stages has seven microbatches in flight, the last has one.
    chain = [layer(stash_bytes=10)] * 12
    assert [s.memory_bytes for s in split(chain, 4, num_stages=4).stages] == [210, 150, 90, 30]
    tight = split(chain, 4, num_stages=4, memory_bytes=150)
    assert [stage.num_layers for stage in tight.stages] == [2, 3, 3, 4]


def test_a_step_fills_the_pipeline():
    chain = [layer()] * 4
    found = split(chain, 4, num_stages=4, microbatches=8)
    assert (found.num_ticks, found.step_seconds) == (11, 33.0)
    assert split(chain, 4, num_stages=4, in_flight="asynchronous").step_seconds == 24.0


# ----------------------------------------------------------- stages that share embedding and head


def test_what_every_stage_does_besides_its_layers_is_added_to_each():
    share = layer(6.0, name="share", weight_bytes=80, state_bytes=7, version_bytes=2)
    chain = [layer(state_bytes=10, version_bytes=1, stash_bytes=3)] * 8
    found = split(chain, 4, num_stages=4, per_stage=share, versions=2)
    assert [stage.seconds for stage in found.stages] == [12.0] * 4
    # Twice 10 and 1, its own 7 and 2, and 7, 5, 3, 1 microbatches in flight; nothing of it is kept.
    assert [stage.memory_bytes for stage in found.stages] == [31 + 6 * n for n in (7, 5, 3, 1)]
    one = split([layer()], 2, num_stages=1, per_stage=share, bandwidth=1.0, microbatches=2)
    assert (one.num_devices, one.seconds) == (1, 9.0)  # two would exchange for 40 s
    assert "everywhere  share: 6000.000 ms of each stage's time" in describe(found, chain)
    assert "slowest     stage 0, computation: 12000.000 ms" in describe(found, chain)
    assert "devices are then busy 100.0%" in describe(found, chain)


def test_a_given_cut_is_priced_as_the_planner_prices_its_own():
    for seed in range(60):
        case = random_case(seed)
        options = case.options | {"memory_bytes": None, "replicate": False}
        found = split(case.layers, case.num_devices, **options)
        counts = [stage.num_layers for stage in found.stages]
        assert partition.priced(case.layers, counts, found.pipeline) == found


def test_a_cut_that_does_not_fill_the_chain_is_refused():
    for counts in [(3, 2), (4, 0), (2,)]:
        with pytest.raises(ValueError, match=r"numbers of at least 1 that add up to 4 layers"):
            partition.priced([layer()] * 4, counts, Pipeline(1.0, 1))


@pytest.mark.parametrize("name", ["llama3_8b", "llama3.2_1b"])
def test_a_spread_chain_adds_up_to_the_model(name):
    model = preset(name)
    chain = layers_of(model, **LLAMA)
    blocks, share = partition.spread(chain, model, num_stages=4)
    assert [each.name for each in blocks] == [f"block {n}" for n in range(model.num_layers)]
    seconds = sum(each.forward for each in blocks) + 4 * share.forward
    assert seconds == pytest.approx(sum(each.forward for each in chain))
    # Whole bytes: up to one more on each stage. A tied table is there once.
    state = sum(each.state_bytes for each in blocks) + 4 * share.state_bytes
    assert 0 <= state - 16 * costs.num_stored_parameters(model) <= 4
    found = split(blocks, 4, num_stages=4, per_stage=share)
    assert {stage.num_layers for stage in found.stages} == {model.num_layers // 4}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(num_stages=4), "num_stages=4 is more than the 3 layers"),
        (dict(num_stages=3, num_devices=2), "num_stages=3 is more than num_devices=2"),
        (dict(num_devices=0), "num_devices=0 must be at least 1"),
        (dict(microbatches=0), "microbatches=0 must be at least 1"),
        (dict(versions=0), "versions=0 must be at least 1"),
        (dict(bandwidth=0.0), "bandwidth=0.0 must be positive"),
        (dict(in_flight="1f2b"), "in_flight='1f2b' is unknown: use one of gpipe, 1f1b"),
        (dict(layers=[]), "there are no layers"),
        (dict(layers=[layer(stash_bytes=-1)]), "layer 'layer': stash_bytes must not be negative"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, words):
    chosen = dict(layers=[layer()] * 3, num_devices=8) | changes
    with pytest.raises(ValueError, match=words):
        split(**chosen)


def test_too_little_memory_says_how_much_is_needed():
    chain = [
        layer(name=name, state_bytes=GIB * size)
        for name, size in (("embedding", 1), ("block 0", 2), ("block 1", 2), ("head", 4))
    ]
    with pytest.raises(ValueError) as refusal:
        split(chain, 4, num_stages=2, memory_bytes=3 * GIB)
    text = str(refusal.value)
    assert f"memory_bytes={3 * GIB} (3.00 GiB) is too little for 4 layers on 4 devices" in text
    assert f"{5 * GIB} bytes (5.00 GiB) on stage 0 of 2 (embedding to block 1, replicas=1)" in text
    assert "use more devices, more stages than 2, remat" in text
    with pytest.raises(ValueError, match=r"4.00 GiB\) on stage 2 of 3 \(head, replicas=1\)"):
        split(chain, 4, memory_bytes=3 * GIB)


def test_many_layers_and_devices_take_seconds():
    draw = random.Random(0)
    chain = [
        layer(draw.random(), state_bytes=draw.randrange(GIB), stash_bytes=2**20,
              weight_bytes=draw.randrange(GIB), output_bytes=2**20)
        for _ in range(128)
    ]  # fmt: skip
    begun = time.process_time()
    found = split(chain, 64, bandwidth=1e10, num_stages=16, memory_bytes=16 * GIB)
    assert time.process_time() - begun < LARGE_SECONDS
    assert len(found.stages) == 16
    assert max(stage.memory_bytes for stage in found.stages) <= 16 * GIB


# ------------------------------------------------------------------------------- profiles of models

LLAMA = dict(tokens=8192, sequence_length=8192, flops_per_second=400e12)


def test_a_profile_adds_up_to_the_model():
    model = preset("llama3_8b")
    chain = layers_of(model, **LLAMA)
    assert [chain[n].name for n in (0, 1, -2, -1)] == ["embedding", "block 0", "block 31", "head"]
    forward = costs.forward_flops_per_token(model, sequence_length=8192) * 8192 / 400e12
    assert sum(each.forward for each in chain) == pytest.approx(forward)
    assert sum(each.backward for each in chain) == pytest.approx(2 * forward)
    assert sum(each.state_bytes for each in chain) == 16 * costs.num_stored_parameters(model)
    assert sum(each.weight_bytes for each in chain) == 2 * costs.num_stored_parameters(model)
    assert {each.output_bytes for each in chain[:-1]} == {2 * 8192 * 4096}
    assert chain[-1].output_bytes == 0


def test_what_is_computed_again_takes_time():
    model = preset("llama3_8b")
    plain, full = layers_of(model, **LLAMA), layers_of(model, **LLAMA, remat="full", loss_chunks=4)
    assert plain[1].backward == pytest.approx(2 * plain[1].forward)
    assert 2.7 < full[1].backward / full[1].forward < 3  # all but the MLP's last product
    assert full[-1].backward == pytest.approx(3 * full[-1].forward)  # logits are made again
    assert full[1].stash_bytes == 2 * 8192 * 4096 < plain[1].stash_bytes / 10


def test_a_tied_table_is_at_both_ends():
    chain = layers_of(preset("llama3.2_1b"), **LLAMA)
    table = 128256 * 2048
    assert chain[0].weight_bytes == 2 * table
    assert chain[-1].weight_bytes == 2 * (table + 2048)


@pytest.mark.parametrize(("num_stages", "counts"), [(2, (17, 15)), (4, (8, 9, 9, 6))])
def test_llama_has_fewer_blocks_on_the_stage_of_its_head(num_stages, counts):
    chain = layers_of(preset("llama3_8b"), **LLAMA, remat="full", loss_chunks=4)
    found = split(chain, num_stages, num_stages=num_stages, bandwidth=50e9, microbatches=16)
    assert to_counts(found) == counts
    assert sum(to_counts(found)) == 32
    # Within a block of what perfect balance would be.
    work = sum(each.forward + each.backward for each in chain)
    assert found.seconds < work / num_stages + chain[1].forward + chain[1].backward


def test_llama_needs_stages_where_memory_is_short():
    chain = layers_of(preset("llama3_8b"), **LLAMA, remat="full", loss_chunks=4)
    ample = split(chain, 8, bandwidth=50e9, memory_bytes=200 * GIB)
    short = split(chain, 8, bandwidth=50e9, memory_bytes=60 * GIB)
    assert len(ample.stages) == 1
    assert len(short.stages) > 1
    assert max(stage.memory_bytes for stage in short.stages) <= 60 * GIB
    assert short.seconds >= ample.seconds


def test_a_stage_without_blocks_counts_none():
    found = split([layer()] * 4, 4, num_stages=4)
    assert to_counts(found) == (0, 1, 1, 0)
    assert to_counts(split([layer()] * 4, 1)) == (2,)


def test_a_profile_needs_a_vocabulary_and_a_known_remat():
    with pytest.raises(ValueError, match="vocab_size=0"):
        layers_of(preset("llama3"), **LLAMA)
    with pytest.raises(ValueError, match="remat='all' is unknown: use one of none, full"):
        layers_of(preset("llama3_8b"), **LLAMA, remat="all")


def test_the_text():
    chain = [
        layer(0.001, name="embedding"),
        layer(0.004, name="block 0", state_bytes=2 * GIB, weight_bytes=10**6),
        layer(0.003, name="head", output_bytes=10**6),
    ]
    found = split(chain, 3, num_stages=2, bandwidth=1e9, microbatches=4)
    assert (
        describe(found, chain)
        == """\
stage  layers                replicas     ms    memory
0      embedding to block 0         2  2.500  2.00 GiB
1      head                         1  3.000  0.00 GiB
slowest     stage 1, computation: 3.000 ms per microbatch
step        4 microbatches in 5 ticks: 15.000 ms on 3 devices
efficiency  71.1%: the pipeline is full in 80.0% of the ticks, devices are then busy 88.9%"""
    )


def test_the_text_names_what_is_slowest():
    chain = [layer(output_bytes=50), layer(weight_bytes=1000)]
    link = split(chain, 2, bandwidth=10.0, num_stages=2)
    assert "slowest     the link from stage 0 to 1: 10000.000 ms" in describe(link, chain)
    heavy = [layer(weight_bytes=1600)]
    exchange = split(heavy, 2, bandwidth=100.0, microbatches=8)
    assert "slowest     stage 0, exchange of gradients: 2000.000 ms" in describe(exchange, heavy)


# ---------------------------------------------------------------------------------- on this machine


def test_measured_layers_can_be_placed():
    model = preset("gemma2", vocab_size=96, num_layers=4, width=32, mlp_dim=64)
    chain = layer_times.measured(
        model, tokens=32, sequence_length=16, policy="fp32", remat="full", runs=2
    )
    counted = layers_of(
        model, tokens=32, sequence_length=16, flops_per_second=1.0, remat="full", loss_chunks=1
    )
    assert all(each.forward > 0 and each.backward > 0 for each in chain)
    assert chain[1].forward == chain[3].forward  # both local
    untimed = dict(forward=0, backward=0)
    assert [dataclasses.replace(each, **untimed) for each in chain] == [
        dataclasses.replace(each, **untimed) for each in counted
    ]
    found = split(chain, 3, num_stages=3)
    assert sum(to_counts(found)) == 4


def test_only_whole_sequences_are_measured():
    with pytest.raises(ValueError, match="tokens=24 is no multiple of sequence_length=16"):
        layer_times.measured(preset("llama3", vocab_size=96), tokens=24, sequence_length=16)
