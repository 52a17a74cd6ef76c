"""Hardware of one's own: files that are read, and what is said of wrong ones."""

import dataclasses
import importlib.resources
import json

import pytest

from llmx.aot import topologies
from llmx.plan import __main__ as command
from llmx.plan import gemm, hardware_file, machines
from llmx.runtime import hardware

H300 = {"name": "h300", "base": "h100", "flops": {"bfloat16": 2e15}, "hbm_bytes": 288 * 2**30}
TORUS = {
    "name": "t9", "flops": {"bfloat16": 1e15}, "hbm_bytes": 64 * 2**30, "hbm_bandwidth": 4e12,
    "link_bandwidth": 1e11, "num_links": 6, "topology": "torus_3d", "max_domain": 4096,
    "network_bandwidth": None,
}  # fmt: skip
CPU = TORUS | {"name": "cpu", "topology": "memory", "max_domain": 64}


def written(path, values):
    path.write_text(json.dumps(values))
    return path


def test_a_base_and_changed_values_are_enough(tmp_path):
    path = written(tmp_path / "h300.json", H300 | {"calibration": {"products": 0.6}})
    machine, base = machines.parse("h300:128x8", path), machines.parse("h100:128x8")
    assert machine.topology.num_devices == 1024 and machine.on_gpu
    assert machine.topology.device_kind == base.topology.device_kind
    chip = machine.core.chip
    assert chip.name == "h300" and chip.flops == base.core.chip.flops | H300["flops"]
    assert chip.hbm_bandwidth == base.core.chip.hbm_bandwidth
    assert machine.core.calibration.products == 0.6
    assert machine.core.calibration.attention == base.core.calibration.attention
    usable = [one.topology.hbm_bytes / one.core.chip.hbm_bytes for one in (machine, base)]
    assert usable[0] == pytest.approx(usable[1])


def test_what_is_written_is_read_back(tmp_path):
    for values in (H300, TORUS, CPU):
        found = hardware_file.of(values)
        again = hardware_file.read(written(tmp_path / "again.json", hardware_file.to_json(found)))
        assert again == found


@pytest.mark.parametrize("base", [*topologies.TPUS, *topologies.GPUS, *hardware.CHIPS])
def test_every_base_is_read_back(base):
    found = hardware_file.of({"name": "own", "base": base})
    assert hardware_file.of(hardware_file.to_json(found)) == found
    known = topologies.TPUS | topologies.GPUS
    if found.base:  # what `calibrate` writes
        all_of_it = dataclasses.replace(found, usable_bytes=int(known[found.base].hbm_bytes))
        assert hardware_file.of(hardware_file.to_json(all_of_it)) == all_of_it


@pytest.mark.parametrize(
    ("values", "name"), [(H300, "h300:2x8"), (TORUS, "t9:2x2x4"), (CPU, "cpu:8")]
)
def test_the_whole_report_works_for_it(values, name, tmp_path, capsys):
    path = written(tmp_path / "own.json", values)
    argv = ["--config=configs/llama3_8b.py", f"--machine={name}", f"--hardware={path}", "--json"]
    sizes = ["--config.mesh.fsdp=-1", "--config.batch.size=16"]
    assert command.main([*argv, *sizes]) in (0, 1)
    report = json.loads(capsys.readouterr().out)
    assert report["machine"] == name and report["time"]["step"] > 0
    assert report["memory"]["limit"] == hardware_file.of(values).usable_bytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base": "h400"}, "base='h400' is unknown: use one of v4, "),
        ({"hbm_byte": 1}, "key 'hbm_byte' is unknown: did you mean 'hbm_bytes'?"),
        ({"hbm_bandwidth": -1.0}, "hbm_bandwidth=-1.0: use more than 0"),
        ({"hbm_bandwidth": 10**400}, "a number of 401 digits: use at most 1e+30"),
        ({"calibration": {"streamed": [[10**300, 1]]}}, "a number of 301 digits"),
        ({"hbm_bandwidth": "3e12"}, "hbm_bandwidth='3e12' is a str: write a number"),
        ({"hbm_bandwidth": float("nan")}, "hbm_bandwidth=nan: write a number that is finite"),
        ({"hbm_bytes": 1.5}, "hbm_bytes=1.5: write a whole number, without point and exponent"),
        ({"hbm_bytes": 1e300}, "hbm_bytes=1e+300: write a whole number, without point"),
        ({"flops": {"bf16": 2e15}}, "'bf16' is unknown: did you mean 'bfloat16'? there are bf"),
        ({"flops": {"bfloat16": 1e-300}}, "flops['bfloat16']=1e-300: use at least 1e+06"),
        ({"link_bandwidth": 0}, "num_links=18, link_bandwidth=0: devices of topology 'switch'"),
        ({"num_links": 0}, 'would send nothing; use more than 0, or give "rates"'),
        ({"hbm_bytes": 80}, "hbm_bytes=80: write bytes, at least 1,048,576"),
        ({"usable_bytes": 75}, "usable_bytes=75: write bytes, at least 1,048,576"),
        ({"hbm_bytes": True}, "hbm_bytes=True is a bool: write a whole number"),
        ({"flops": {"bfloat16": 0}}, "flops['bfloat16']=0: use more than 0"),
        ({"flops": 2e15}, "is a float: write an object"),
        ({"topology": "ring"}, "topology='ring': use one of torus_2d"),
        ({"name": "H 300"}, "name='H 300': write lower case letters"),
        ({"usable_bytes": 2**60}, "is more than a device's memory"),
        ({"calibration": {"product": 0.5}}, "did you mean 'products'?"),
        ({"calibration": {"products": 1.5}}, "calibration.products=1.5 is a share: use at most 1"),
        ({"calibration": {"table": [[1, 2, 3]]}}, "calibration.table[0]=[1, 2, 3]: write [m, n, k"),
        ({"calibration": {"table": [[1, 2, 3, "bf16", 0.5]]}}, "dtype is one of float32"),
        ({"rates": {"link": 0}}, "rates.link=0: use more than 0"),
        ({"rates": []}, "rates=[] is a list: write an object"),
    ],
)
def test_wrong_values_are_named(change, words):
    with pytest.raises(ValueError) as error:
        hardware_file.of(H300 | change)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("h100:8", H300, "is of 'h300': write h300:SHAPE"),
        ("h300:2x16", H300, "16 chips in one domain, and links join at most max_domain=8"),
        ("t9:4x4", TORUS, "torus_3d has 3 sizes"),
        ("2@cpu:4", CPU, "2@ counts slices of a torus"),
        ("t9:4x4x4", {"name": "t9"}, "missing, and there is no base"),
    ],
)
def test_wrong_machines_are_named(name, values, words, tmp_path):
    with pytest.raises(ValueError) as error:
        machines.parse(name, written(tmp_path / "own.json", values))
    assert words in str(error.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ValueError, match="hardware file '': name a file"):
        machines.parse("h300:8", "")
    with pytest.raises(ValueError, match="No such file"):
        machines.parse("h300:8", tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        machines.parse("h300:8", tmp_path / "bad.json")
    with pytest.raises(ValueError, match=r"llmx[.]plan calibrate --out cpu[.]json"):
        machines.parse("cpu:1")


def test_a_size_beyond_whole_numbers_of_64_bits_is_computed_with():
    shipped = importlib.resources.files("llmx.plan") / "tables" / "h200.json"
    values = json.loads(shipped.read_text())
    values["calibration"]["table"][0][0] = 10**29
    assert 0 < gemm.seconds(4096, 4096, 4096, "bfloat16", hardware_file.of(values).core) < 1
