"""Where implementations of attention run, which is said before anything is traced."""

import pytest

from llmx.model.attention import attend


@pytest.mark.parametrize("name", ["auto", *attend.IMPLEMENTATIONS])
@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_what_runs_on_other_devices_is_refused(name, platform):
    others = {("cudnn", "cpu"), ("cudnn", "tpu"), ("splash", "gpu"), ("triton", "tpu")}
    text = attend.refusal(name, platform)
    assert bool(text) == ((name, platform) in others)
    assert not text or (f"implementation={name!r}" in text and "use 'auto'" in text)
