"""What the command says where lm-evaluation-harness is not installed."""

import sys

from llmx.evaluate import harness


def test_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert harness.main(["--tasks", "asked"]) == 2
    assert "pip install 'lm-eval>=0.4.13'" in capsys.readouterr().err
