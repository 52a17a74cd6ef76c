"""The planner's report on the tables of a model of clicks."""

import json
import pathlib

import pytest

from llmx.plan import __main__ as command

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs/dlrm.py")
ON = ["--config", CONFIG, "--machine", "h100:8"]


def planned(capsys, *flags) -> dict:
    assert command.main([*ON, "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_tables_are_split_over_the_devices(capsys):
    """Of rows an eighth, with those that fill up; one device sends nothing and has all."""
    shares = planned(capsys)["memory"]["held"]
    rows = 2_769_296 * 16 * 4
    assert rows / 8 <= shares["rows"] < rows / 8 * 1.01
    assert shares["optimizer of rows"] * 16 == shares["rows"]  # row_adagrad: one number of a row
    flags = ("--config.tables.optimizer=adam", "--config.tables.weight_decay=0.1")
    adam = planned(capsys, *flags)["memory"]["held"]
    assert adam["optimizer of rows"] * 16 == shares["rows"] * (2 * 16 + 2)


def test_traffic_is_that_of_a_share_of_the_ids(capsys):
    found = planned(capsys)["sent"]
    asked = 1.5 * 1024 / 8 * 26 / 8  # of each device by each other
    wanted = {name: 7 * 4 * asked * width for name, width in
              (("ids", 1), ("rows", 16), ("gradients", 17))}  # fmt: skip
    assert found == pytest.approx(wanted)


def test_what_is_not_counted_is_said_and_refused(capsys):
    assert command.main(ON) == 0
    said = capsys.readouterr().out
    assert "not counted: the time of a step" in said and "all-to-all  gradients" in said
    assert command.main([*ON, "--search"]) == 2
    assert "--search with model.recommender.name='dlrm'" in capsys.readouterr().err
    assert command.main([*ON, "--config.mesh=auto"]) == 2
    assert "is for decoders" in capsys.readouterr().err


def test_tables_that_do_not_fit_end_with_1(capsys):
    wide = ["--config.model.recommender.width=16384", "--config.model.recommender.bottom=(16384,)"]
    assert command.main(["--config", CONFIG, "--machine", "v5e:2x4", *wide]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_a_cache_is_what_devices_have(capsys):
    """49,152 slots of all tables together, and the host's rows beside them in words."""
    host = str(pathlib.Path(CONFIG).with_name("dlrm_host.py"))
    assert command.main(["--config", host, "--machine", "h100:8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["held"]["rows"] == 49_152 / 8 * 16 * 4
    assert "a cache of 49,152 rows of the host's 0.02 GiB" in found["run"]["model"]
