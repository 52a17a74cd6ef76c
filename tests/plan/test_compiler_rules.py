"""What the compilers of chips do differently, as it was read from programs that nobody chose."""

import pytest
from support.resolved import resolved

from llmx.aot import topologies
from llmx.config import loss_memory
from llmx.plan import (
    candidates,
    exchange,
    machines,
    memory,
    operators,
    sizes,
    step_time,
    traffic,
    uncertain,
)  # fmt: skip

V5E, V5P, H100 = (topologies.parse(name) for name in ("v5e:2x4", "v5p:2x2x2", "h100:8"))


def _run(width: int = 2048, **keys):
    return resolved(**dict(mesh__data=1, batch__size=16, model__width=width) | keys)


def _of_head(run, topology):
    counted = sizes.of(run)
    return [
        one for one in exchange.on(counted, topology)
        if one.purpose == "gradients" and one.name == counted.head.name
    ]  # fmt: skip


def test_sums_are_exchanged_axis_by_axis_on_some_chips():
    """As `sharding.psum_scatter` does it: along each axis what the axes before it left."""
    run = _run(mesh__fsdp=4, mesh__sequence=2)
    (whole,) = _of_head(run, V5P)
    assert (whole.kind, whole.size) == ("reduce-scatter", 8)
    parts = _of_head(run, V5E)
    assert [(one.kind, one.axes, one.size, one.bytes) for one in parts] == [
        ("all-to-all", ("fsdp",), 4, whole.bytes),
        ("all-to-all", ("sequence",), 2, whole.bytes / 4),
    ]
    assert sum(one.sent for one in parts) == pytest.approx(whole.sent)


def test_the_last_chunk_of_the_loss_is_there_while_layers_are_differentiated():
    """On GPUs that gather weights ahead: the gradients of its logits, and the head's of it."""
    run = _run(mesh__fsdp=8, loss__chunks=4, model__vocab_size=32768)
    tokens, rows = 16 * run.batch.sequence_length / 8, 32768 / 4
    assert loss_memory.kept_logits(run, on_gpu=True) == 2 * (tokens + 2048) * rows
    assert loss_memory.kept_logits(run) == 0
    whole = _run(mesh__data=8, loss__chunks=4, sharding__layout="ddp")
    assert loss_memory.kept_logits(whole, on_gpu=True) == 0


def test_queries_are_copied_with_one_microbatch():
    """On GPUs that gather weights."""

    def copies(accumulation, **keys):
        keys |= dict(batch__accumulation=accumulation, batch__size=8 * accumulation, remat="names")
        held = memory.of(sizes.of(_run(**keys)), on_gpu=True).peaks[memory.BACKWARD]
        return held.get("copies of activations", 0)

    run = _run(mesh__fsdp=8)
    queries = 2 * run.batch.sequence_length * run.model.num_heads * run.model.head_dim
    assert copies(1, mesh__fsdp=8) == queries * run.model.num_layers
    assert copies(2, mesh__fsdp=8) == copies(4, mesh__fsdp=8) == 0


def _at_the_loss(on_gpu: bool, **keys):
    counted = sizes.of(_run(**keys, remat="full"))
    held = memory.of(counted, on_gpu=on_gpu).peaks[memory.END_OF_FORWARD].get("gradients", 0)
    head = counted.reduce_bytes * counted.local(counted.head, "gradients")
    layers = counted.reduce_bytes * sum(
        counted.local(leaf, "gradients") for leaf in counted.weights
    )  # fmt: skip
    return held, head, layers


def test_gradients_that_are_there_at_the_loss():
    keys = dict(model__vocab_size=32768, loss__chunks=4)
    whole = dict(mesh__data=8, sharding__layout="ddp", **keys)
    held, head, layers = _at_the_loss(False, **whole)
    assert held > head + layers  # norms too
    # GPUs round the head's behind the loss, unless it stays in fp32.
    shares = whole | dict(sharding__layout="zero1")
    assert _at_the_loss(True, **shares)[0] == _at_the_loss(True, **whole)[0] == held - head
    exact = dict(precision="bf16_fp32_reduce")
    assert _at_the_loss(True, **shares, **exact)[0] == _at_the_loss(True, **whole, **exact)[0]
    assert _at_the_loss(True, **whole, **exact)[0] > _at_the_loss(True, **exact, **whole)[1]
    # XLA:TPU makes those of layers behind it where weights are gathered.
    gathered, head, layers = _at_the_loss(False, mesh__fsdp=8, **keys)
    assert 2 * head <= gathered < 2 * head + layers / 20  # of both tables, and norms
    assert _at_the_loss(False, **whole)[0] == held


def test_periods_of_several_kinds_make_their_gradients_behind_the_loss():
    keys = dict(
        mesh__data=8, sharding__layout="ddp", model__num_layers=8,
        loss__chunks=4, batch__size=32,
    )  # fmt: skip
    local = dict(model__layer_pattern=("local", "global"), model__window=128)
    assert _at_the_loss(True, **keys, **local, batch__accumulation=2)[0] == 0
    assert _at_the_loss(True, **keys, **local)[0] > 0
    assert _at_the_loss(True, **keys, batch__accumulation=2)[0] > 0


def test_a_plain_mlp_on_one_gpu_has_five_arrays():
    def layer(**keys):
        peaks = memory.of(sizes.of(_run(remat="full", **keys)), on_gpu=True).peaks
        return peaks[memory.BACKWARD]["a layer"]

    run = _run()
    of_one = 2 * run.batch.size * run.batch.sequence_length * run.model.mlp_dim
    alone = dict(mesh__data=1)
    assert layer(**alone) - layer(**alone, model__gated_mlp=False) == of_one


def test_turns_sum_gradients_in_pairs_in_bf16_only():
    """Of weights that are whole, on GPUs; fp32 sums are added up before."""

    def times(precision, turns):
        run = _run(mesh__data=4, mesh__tensor=2, sharding__layout="ddp", precision=precision)
        (found,) = (
            one.count
            for one in traffic.of(sizes.of(run), turns=turns, on_gpu=True)
            if one.name == "blocks/mlp/up/kernel" and one.purpose == "gradients"
        )
        return found

    assert times("bf16", 4) == 2 * times("bf16", 1)
    assert times("bf16_fp32_reduce", 4) == times("bf16_fp32_reduce", 1)


def test_zero2_has_shares_of_all_new_values_before_they_are_gathered():
    """On GPUs, but not with `tensor`."""

    def update(on_gpu, **keys):
        counted = sizes.of(_run(batch__size=16, sharding__layout="zero2", **keys))
        held = memory.of(counted, on_gpu=on_gpu).peaks[memory.UPDATE]["updated parameters"]
        leaves = [*counted.weights, counted.head, counted.head]  # and the embedding
        whole, shares = (
            4 * sum(counted.local(leaf, table) for leaf in leaves)
            for table in ("parameters", "optimizer")
        )
        return held, whole, shares

    held, whole, shares = update(True, mesh__data=8)
    assert held == whole + shares and shares == whole / 8
    held, whole, _ = update(True, mesh__data=4, mesh__tensor=2)
    assert held == whole


def test_fewer_lanes_are_scattered_over_16():
    """As compiled for v5p:2x2x4, with 53 and 101."""
    keys = dict(mesh__fsdp=16, loss__chunks=1, batch__size=16)
    kinds = [
        _of_head(_run(1024, **keys, model__vocab_size=128 * lanes), topologies.parse("v5p:2x2x4"))
        for lanes in (53, 101)
    ]
    assert [[one.kind for one in of] for of in kinds] == [["reduce-scatter"], ["all-reduce"]]


def test_averages_have_their_place_in_padded_tables():
    keys = dict(mesh__fsdp=8, model__vocab_size=128 * 197, loss__chunks=1, remat="full")
    tables = [
        memory.of(sizes.of(_run(1536, **keys, optimizer__ema_decay=decay))).peaks[moment]
        ["tables in another layout"]
        for decay in (0.0, 0.9)
        for moment in (memory.END_OF_FORWARD, memory.BACKWARD)
    ]  # fmt: skip
    assert tables[0] == tables[1] and tables[2] == tables[3]
    assert tables[2] * 3 == pytest.approx(tables[0] * 4)


def test_without_remat_each_group_of_turns_gathers_weights_of_its_own_on_gpus():
    keys = dict(mesh__fsdp=4, mesh__tensor=2, batch__size=16)
    gathers = lambda turns, on_gpu=True, **more: sum(  # noqa: E731
        one.sent for one in traffic.of(sizes.of(_run(**keys | more)), turns=turns, on_gpu=on_gpu)
        if one.kind == "all-gather" and one.name.startswith("blocks/")
    )  # fmt: skip
    assert gathers(2, remat="none") == 2 * gathers(1, remat="none")
    assert gathers(2, remat="full") == gathers(1, remat="full") == gathers(1, remat="none")
    # XLA:TPU makes one of them.
    assert gathers(2, on_gpu=False, remat="none") == gathers(1, remat="none")


def test_one_device_sums_the_gradient_of_the_head_in_fp32():
    run = _run(loss__chunks=4, model__vocab_size=32768)
    peaks = memory.of(sizes.of(run)).peaks
    assert "gradients" not in peaks[memory.END_OF_FORWARD]
    assert peaks[memory.BACKWARD]["gradient of the head"] == 4 * 32768 * 2048
    peaks = memory.of(sizes.of(_run(mesh__fsdp=8, loss__chunks=4, model__vocab_size=32768))).peaks
    assert "gradient of the head" not in peaks[memory.BACKWARD]


@pytest.mark.parametrize(
    ("width", "lanes", "kind"),
    [
        (2048, 197, "reduce-scatter"), (1536, 197, "all-reduce"), (1536, 149, "reduce-scatter"),
        (1536, 2 * 197, "all-reduce"), (1536, 256, "reduce-scatter"),
    ],
)  # fmt: skip
def test_the_head_is_summed_whole_where_columns_and_rows_are_no_lanes(width, lanes, kind):
    """Over 8 devices: where columns are no whole lanes, and rows cannot be taken in equal parts.
    What is kept in another layout depends on the columns alone."""
    run = _run(width, mesh__fsdp=8, model__vocab_size=128 * lanes, loss__chunks=1)
    assert [one.kind for one in _of_head(run, V5P)] == [kind]
    assert [one.kind for one in _of_head(run, H100)] == ["reduce-scatter"]
    held = memory.of(sizes.of(run)).peaks
    cut = width == 1536
    assert ("gradient of the head" in held[memory.END_OF_FORWARD]) == cut
    # Its update is in another layout: gradients in both, new values and moments of 256 columns.
    table = 4 * run.model.padded_vocab * width // 8
    relaid = held.get(memory.UPDATE, {}).get("a table in another layout")
    assert (relaid is None) != cut
    assert relaid is None or relaid == pytest.approx(2 * table * (1 + 256 / 192))
    # These, of both tables, have their place from the beginning.
    padded = held[memory.BACKWARD].get("tables in another layout")
    assert (padded is None) == (relaid is None)
    assert padded is None or padded == pytest.approx(2 * 3 * table * 256 / 192)
    # Sums over microbatches have the layout of the loop that makes them.
    several = memory.of(sizes.of(_run(width, mesh__fsdp=8, batch__accumulation=2))).peaks
    assert "tables in another layout" not in several[memory.BACKWARD]


@pytest.mark.parametrize(
    ("mesh", "logits"),
    [
        ({"mesh__fsdp": 8}, 2), ({"mesh__fsdp": 8, "batch__accumulation": 2}, 2),
        ({"mesh__fsdp": 8, "model__tied_head": True}, 4),
        ({"mesh__fsdp": 4, "mesh__tensor": 2}, 1),
        ({"mesh__data": 8, "sharding__layout": "zero1"}, 1),
    ],
)  # fmt: skip
def test_two_chunks_are_written_out_where_weights_are_gathered_ahead(mesh, logits):
    """On GPUs: then the logits of both are there, and with a tied head in both passes."""
    of_run = lambda length: _run(**mesh, batch__sequence_length=length, loss__chunks=2)  # noqa: E731
    short, long = (loss_memory.of(of_run(n), on_gpu=True) for n in (256, 512))
    run = of_run(256)
    tokens = sizes.of(run).tokens
    rows = run.model.padded_vocab / 2 / run.mesh.tensor
    of_logits = 4 * logits * rows + (2 * rows if logits == 1 else 0)
    assert long - short == pytest.approx(tokens * (of_logits + 4 * run.model.width))


def test_a_head_that_is_summed_in_fp32_is_its_own_gradient():
    keys = dict(mesh__data=8, sharding__layout="zero1", loss__chunks=4)
    found = {
        precision: loss_memory.of(_run(**keys, precision=precision), on_gpu=True)
        for precision in ("bf16", "bf16_fp32_reduce")
    }
    head = sizes.of(_run(**keys)).head.numbers
    assert found["bf16"] - found["bf16_fp32_reduce"] == pytest.approx(4 * head)


def _peaks(devices: int, keys, on_gpu: bool = True, device_bytes: int | None = None):
    run = _run(**{"mesh__data": devices, "sharding__layout": "ddp"} | keys)
    return memory.of(sizes.of(run), on_gpu=on_gpu, device_bytes=device_bytes).peaks


def test_one_gpu_begins_nothing_before_it_is_needed():
    """Gradients come behind the loss, arrays of the MLP are 6 and not 9, queries are not copied."""
    keys = dict(model__positions="learned", remat="names", loss__chunks=2)
    for chunks in (1, 2):
        one, two = (
            _peaks(num, keys | dict(batch__size=4 * num, loss__chunks=chunks)) for num in (1, 2)
        )
        assert "gradients" not in one[memory.END_OF_FORWARD]
        assert two[memory.END_OF_FORWARD]["gradients"] > 0
        assert "copies of activations" not in one[memory.BACKWARD]
        assert two[memory.BACKWARD]["copies of activations"] > 0
    run = _run(mesh__data=2, sharding__layout="ddp", batch__size=8)
    of_mlp = 2 * sizes.of(run).tokens * run.model.mlp_dim
    less = two[memory.BACKWARD]["a layer"] - one[memory.BACKWARD]["a layer"]
    assert less == pytest.approx(3 * of_mlp)


def test_rotated_queries_are_not_copied_where_nothing_is_gathered():
    keys = dict(batch__size=8, remat="names")
    assert "copies of activations" not in _peaks(2, keys)[memory.BACKWARD]
    split = dict(mesh__data=1, mesh__fsdp=2, sharding__layout="zero3")
    assert "copies of activations" in _peaks(2, keys | split)[memory.BACKWARD]


@pytest.mark.parametrize(
    ("keys", "copied"),
    [
        ({}, True), (dict(remat="sqrt"), False), (dict(precision="fp32"), False),
        (dict(model__num_layers=2), False),
        (dict(mesh__data=1, mesh__fsdp=2, sharding__layout="zero3"), False),
    ],
)  # fmt: skip
def test_weights_that_fp8_turns_are_copied_before_a_loop_over_all_layers(keys, copied):
    keys = dict(model__num_layers=8, remat="full") | keys
    found = {
        form: _peaks(2, keys | dict(products__format=form))[memory.BACKWARD].get(
            "copies of weights and gradients", 0
        )
        for form in ("", "fp8")
    }
    assert (found["fp8"] > found[""]) == copied


def test_an_update_holds_what_is_on_its_way():
    """On GPUs, of whole gradients: the last one, and shares of new values; within what XLA lets
    its schedule take."""
    keys = dict(sharding__layout="zero1")
    run = _run(mesh__data=8, **keys)
    counted = sizes.of(run)
    new = sum(4 * counted.local(leaf, "parameters") for leaf in counted.weights)
    free = _peaks(8, keys)[memory.UPDATE]["updated parameters"]
    split = _peaks(8, dict(sharding__layout="zero2"))[memory.UPDATE]["updated parameters"]
    assert new < split < free
    state = sum(memory.state(counted).values())
    limit = (state + 0.9 * free) / 0.8
    held = memory.of(counted, on_gpu=True, device_bytes=limit)
    least = held.peaks[memory.UPDATE]["updated parameters"]
    assert least == pytest.approx(0.95 * 0.9 * free) and least < free
    held = memory.of(counted, on_gpu=True, device_bytes=state)
    assert memory.UPDATE not in held.peaks  # nothing is left for it, and it is never below 0


def test_layers_that_save_everything_have_no_gradients_in_the_loss():
    for on_gpu in (False, True):
        kept, other = (_peaks(8, dict(remat=text), on_gpu) for text in ("none", "full"))
        assert "gradients" not in kept[memory.END_OF_FORWARD]
        assert other[memory.END_OF_FORWARD]["gradients"] > 0


@pytest.mark.parametrize(
    ("keys", "number"),
    [
        (dict(mesh__fsdp=8), 12 / 8), (dict(mesh__fsdp=8, loss__chunks=4), 12 / 8),
        (dict(mesh__data=8, sharding__layout="ddp"), 12),
        (dict(mesh__data=8, sharding__layout="ddp", loss__chunks=4), 12 + 12),
        (dict(mesh__data=8, sharding__layout="ddp", model__tied_head=True), 12 + 8),
    ],
)  # fmt: skip
def test_tables_are_read_and_written_on_gpus(keys, number):
    """Of a number of the table: zeros, rows added; a head's gradient added; its chunks."""
    counted = sizes.of(_run(**({"loss__chunks": 1} | keys)))
    core = machines.parse("h100:8").core
    (found,) = (one for one in operators.of(counted, core, operators.GPU) if one.name == "tables")
    assert found.bytes == pytest.approx(number * counted.head.numbers)
    on_tpu = operators.of(counted, core, operators.TPU)
    assert not any(one.bytes for one in on_tpu if one.name == "tables")


def _kinds(run, topology):
    """Of the sums of layers' matrices: {"attention", "mlp"}: the collective."""
    sent = exchange.on(sizes.of(run), topology)
    return {
        one.name.split("/")[1]: one.kind
        for one in sent if one.purpose == "gradients" and one.name.endswith("/kernel")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("topology", "mesh", "kind"),
    [
        ("v5e:8x8", {"mesh__fsdp": 64}, "all-reduce"),
        ("v5e:8x8", {"mesh__fsdp": 16, "mesh__tensor": 4}, "reduce-scatter"),
        ("2@v5e:4x4", {"mesh__data": 2, "mesh__fsdp": 16, "sharding__layout": "hsdp"},
         "all-reduce"),
        # As many as a slice has, and of different slices.
        ("8@v5e:2x4", {"mesh__fsdp": 8, "mesh__tensor": 8, "mesh__across_slices": ("fsdp",),
                       "model__num_heads": 16, "model__num_kv_heads": 8}, "reduce-scatter"),
        ("v5e:4x4", {"mesh__fsdp": 16}, "all-to-all"),
        ("v5p:4x4x4", {"mesh__fsdp": 64}, "reduce-scatter"),
    ],
)  # fmt: skip
def test_gradients_are_summed_over_all_of_a_large_slice_of_v5e(topology, mesh, kind):
    run = _run(**mesh, batch__size=64)
    assert set(_kinds(run, topologies.parse(topology)).values()) == {kind}


@pytest.mark.parametrize(
    ("width", "of_attention", "is_said"),
    [
        (3000, "all-reduce", False),  # 375 columns
        (3040, "all-reduce", False),  # 380
        (3008, "reduce-scatter", True),  # 376: some of them
        (2944, "reduce-scatter", False),  # 368, and whole lanes
        (3200, "reduce-scatter", False),  # 400
    ],
)
def test_attention_is_summed_where_columns_are_no_rows(width, of_attention, is_said):
    run = _run(width, mesh__fsdp=8, model__num_layers=24)
    assert _kinds(run, V5P) == {"attention": of_attention, "mlp": "reduce-scatter"}
    assert _kinds(run, H100) == {"attention": "reduce-scatter", "mlp": "reduce-scatter"}
    said = uncertain.of(run, V5P, exchange.on(sizes.of(run), V5P), 1.0)
    assert any("gradients of attention" in line for line in said) == is_said


def test_what_is_uncertain_is_said():
    def said(run, topology, step=1.0):
        return uncertain.of(run, topology, exchange.on(sizes.of(run), topology), step)

    run = _run(mesh__fsdp=8, model__num_layers=24, model__vocab_size=100_000)
    assert said(run, H100) == []
    fp8 = _run(
        mesh__fsdp=8, model__num_layers=24, model__vocab_size=100_000, products__format="fp8"
    )
    assert "fp8 on GPUs" in said(fp8, H100)[0]
    assert "this small" in said(_run(mesh__fsdp=8, model__vocab_size=8192), H100)[0]
    odd = _run(
        2500 * 8, mesh__fsdp=8, model__num_layers=24, model__vocab_size=128 * 197, loss__chunks=1
    )
    assert "scatters it where" in said(odd, V5P)[0]
    assert [line[:24] for line in said(run, V5P)] == ["the gradient of the head"]
    assert said(run, V5E) == [] and "this short" in said(run, V5E, 0.01)[0]
    short = _run(mesh__fsdp=8, model__num_layers=24, model__vocab_size=100_000, batch__size=8)
    assert "few tokens" in said(short, H100)[0] and "few tokens" not in str(said(short, V5P))
    alone = topologies.parse("v5p:1x1x1")
    assert "on one TPU" in str(said(_run(), alone)) and "on one TPU" not in str(said(run, V5P))
    zb = dict(mesh__fsdp=2, mesh__stage=4, batch__accumulation=4, pipeline__schedule="zb_h1")
    bubble = _run(**zb, remat="full")
    assert "zero-bubble" in str(said(bubble, V5P)) and "zero-bubble" not in str(said(bubble, H100))
    stages = _run(mesh__fsdp=2, mesh__stage=4, batch__accumulation=4)
    assert "stages of one layer" in said(stages, H100)[0]
    assert "a pipeline on GPUs" in str(said(bubble, H100))
    assert "a pipeline on GPUs" not in str(said(bubble, V5P))
    saves_all = _run(**zb, remat="none")
    assert "layers save all: a quarter" in str(said(saves_all, H100))
    deep = dict(batch__accumulation=8, model__num_layers=16)
    v_shaped = _run(**zb | deep | dict(pipeline__schedule="dual_pipe_v"))
    assert "dual_pipe_v" in str(said(v_shaped, H100)) and "dual_pipe_v" not in str(
        said(bubble, H100)
    )
    for keys, words in (dict(remat="part"), True), (dict(), False):
        once = _run(**zb | keys | dict(pipeline__schedule="1f1b"), sharding__gather="step")
        assert ("gathered once a step with part" in str(said(once, H100))) == words
    for tied in True, False:
        once = _run(mesh__fsdp=8, sharding__gather="step", model__tied_head=tied)
        assert ("beside a tied head" in str(said(once, V5P))) == tied
    experts = dict(model__num_experts=4, model__experts_per_token=2, model__expert_dim=512)
    assert any(
        "a mixture of few layers" in line for line in said(_run(mesh__fsdp=8, **experts), V5P)
    )
    many = _run(mesh__fsdp=8, **experts, model__num_layers=24)
    assert not any("mixture" in line for line in said(many, V5P))


@pytest.mark.parametrize(
    ("num_layers", "keys", "passes", "left_out"),
    [
        (8, dict(mesh__fsdp=8), 1, 4),  # four segments of two
        (9, dict(mesh__fsdp=8), 1, 0),  # of three
        (8, dict(mesh__fsdp=4, mesh__tensor=2), 1, 0),  # nothing is gathered ahead
        (8, dict(mesh__fsdp=4, mesh__stage=2, batch__accumulation=4), 5, 4),  # chunks, in ticks
    ],
)
def test_gpus_do_not_run_the_last_of_two_layers_again(num_layers, keys, passes, left_out):
    """They write out a loop of two turns where they gather weights ahead."""
    whole = num_layers * keys.get("mesh__stage", 1)
    keys |= dict(model__num_layers=whole, pipeline__schedule="1f1b", remat="sqrt")
    counted = sizes.of(_run(**keys))

    def gathered(topology):
        return [
            one.count for one in exchange.on(counted, topology)
            if one.kind == "all-gather" and one.name.endswith("mlp/up/kernel")
        ]  # fmt: skip

    assert gathered(V5P) == [passes * 3 * num_layers]
    assert gathered(H100) == [passes * (3 * num_layers - left_out)]


@pytest.mark.parametrize(
    ("width", "kind"), [(2048, "all-reduce"), (2304, "all-gather")], ids=["16 MiB", "more"]
)
def test_small_weights_are_summed_over_a_large_slice_of_v5e(width, kind):
    """In place of a gather: where sums of gradients are not exchanged either."""
    keys = dict(model__num_kv_heads=8, model__num_heads=16, model__head_dim=512)
    run = _run(width, mesh__fsdp=64, batch__size=64, **keys)
    counted = sizes.of(run)

    def of_keys(name):
        return [
            one.kind for one in exchange.on(counted, topologies.parse(name))
            if one.purpose == "weights" and one.name.endswith("attention/key/kernel")
        ]  # fmt: skip

    assert of_keys("v5e:8x8") == [kind]
    assert of_keys("v5p:4x4x4") == of_keys("h100:8x8") == ["all-gather"]


def test_a_second_layer_that_saves_something_is_run_again():
    keys = dict(mesh__fsdp=8, model__num_layers=8)

    def gathered(remat):
        (found,) = [
            one.count for one in exchange.on(sizes.of(_run(remat=remat, **keys)), H100)
            if one.kind == "all-gather" and one.name.endswith("mlp/up/kernel")
        ]  # fmt: skip
        return found

    assert gathered("sqrt") == gathered("sqrt+full") == 20
    assert gathered("sqrt+names") == gathered("sqrt+attention") == 24


@pytest.mark.parametrize(
    ("machine", "keys", "words"),
    [
        (V5E, dict(attention__implementation="cudnn"), "runs on GPUs"),
        (H100, dict(attention__implementation="splash"), "runs on TPUs"),
        (V5E, dict(attention__implementation="splash", batch__sequence_length=1000), "of 128"),
        (H100, dict(attention__implementation="cudnn"), "set data.pack=False"),
        (H100, dict(attention__implementation="cudnn", precision="fp32"), "not float32"),
        (H100, dict(attention__implementation="cudnn", data__pack=False), ""),
        (H100, dict(attention__implementation="triton"), ""),
        (V5E, dict(attention__implementation="reference"), ""),
        (V5E, dict(batch__sequence_length=1000), ""),
    ],
)  # fmt: skip
def test_kernels_that_do_not_run_are_refused(machine, keys, words):
    found = candidates.of_attention(_run(mesh__fsdp=8, **keys), machine)
    assert words in found and bool(found) == bool(words)


def test_attention_through_memory_is_said_to_be_uncertain():
    def said(**keys):
        run = _run(mesh__fsdp=8, **keys)
        return [one for one in uncertain.of(run, V5E, [], 1.0) if "attention by" in one]

    assert said(attention__implementation="blockwise") and said(batch__sequence_length=1000)
    assert not said() and not said(attention__implementation="splash")


def test_without_a_sequence_axis_ulysses_splits_nothing():
    def times(ulysses):
        run = _run(mesh__fsdp=8, data__pack=False)
        run.attention.ulysses = ulysses  # which a config may not set here
        return step_time.of(run, machines.parse("h100:8")).step

    assert times(2) == times(1)


def test_what_is_gathered_once_a_step():
    """All layers of a stage, of PipeDream-2BW in both versions, and a head that is not tied: a tied
    one is a table of lookups, which stays split."""
    stages = dict(mesh__stage=2, mesh__fsdp=4, batch__accumulation=4, model__num_layers=8)
    for keys, times in (
        (dict(mesh__fsdp=8, model__num_layers=8), 8), (stages, 4),
        (stages | dict(pipeline__schedule="interleaved_1f1b"), 4),
        (stages | dict(pipeline__schedule="pipedream_2bw"), 8),
    ):  # fmt: skip
        for tied in True, False:
            run = _run(sharding__gather="step", model__tied_head=tied, loss__chunks=2, **keys)
            counted = sizes.of(run)
            count = {
                name: sum(
                    one.count for one in exchange.on(counted, H100)
                    if one.kind == "all-gather" and one.name == name
                )
                for name in ("blocks/mlp/up/kernel", counted.head.name)
            }  # fmt: skip
            assert count["blocks/mlp/up/kernel"] == times, keys
            once = 2 * (1 + (run.pipeline.schedule == "pipedream_2bw"))
            assert count[counted.head.name] == once or tied
            assert count[counted.head.name] > once or not tied
    # The last turn of a loop looks nothing up: token ids are gathered ahead all the same.
    for tied, idle in (True, 0), (False, 1):
        run = _run(sharding__gather="step", model__tied_head=tied, **stages)
        sent = [exchange.on(sizes.of(run), machine) for machine in (V5P, H100)]
        lookups = [sum(m.count for m in of if m.purpose == "lookups and heads") for of in sent]
        assert lookups[0] - lookups[1] == idle


@pytest.mark.parametrize(
    ("ways", "lanes", "whole"), [(64, 37, True), (64, 19, False), (32, 43, False), (16, 101, True)]
)
def test_gradients_of_an_mlp_of_large_prime_factors_are_summed_whole(ways, lanes, whole):
    """On TPUs, where a device's columns are no whole lanes: as compiled."""
    keys = dict(mesh__fsdp=ways, batch__size=ways, model__width=64 * ways)
    counted = sizes.of(_run(**keys, model__mlp_dim=4 * lanes * 128))
    of_mlp = {
        one.kind for one in traffic.of(counted)
        if "/mlp/" in one.name and one.purpose == "gradients" and one.bytes > 2**20
    }  # fmt: skip
    assert of_mlp == {"all-reduce" if whole else "reduce-scatter"}
    # Of whole lanes none is.
    wide = sizes.of(_run(**keys | dict(model__width=128 * ways), model__mlp_dim=4 * lanes * 128))
    assert "all-reduce" not in {one.kind for one in traffic.of(wide) if "/mlp/" in one.name}
