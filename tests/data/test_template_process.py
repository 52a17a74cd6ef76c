"""Chat templates that take too much: an error soon, and the next one works."""

import os
import time

import pytest

from llmx.data import chat, template_process, tokenizers

TALK = [{"role": "user", "content": "hi"}]
GROW = (
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(99) %%}{%% set ns.x = %s %%}{%% endfor %%}"
)


def render(source):
    return chat.Template(source, tokenizers.ByteTokenizer()).render(TALK).text


@pytest.mark.parametrize("source", [
    "{{ 'x' * 10**10 }}",  # at its compilation already
    "{{ messages[0].content * 10**10 }}",
    GROW % ("'ab'", "ns.x ~ ns.x"),
    "{{ messages[0].content.center(10**10) }}",
    "{{ '{:>10000000000}'.format(messages | length) }}",
    "{{ '%9999999999d' % messages | length }}",
    "{% for i in range(99999) %}{{ messages[0].content * 50000 }}{% endfor %}",
])  # fmt: skip
def test_a_template_that_takes_too_much_memory(source):
    before = max_resident()
    with pytest.raises(
        ValueError, match=r"template takes more than 1024 MiB: correct the template"
    ):
        render(source)
    assert max_resident() - before < 200 << 20  # of this process
    assert render("{{ messages[0].content }}") == "hi"


def max_resident() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


@pytest.mark.parametrize("source", [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(100) }}",
    "{{ (7 ** (10 ** messages | length * 10 ** 9)) % 3 }}",
])  # fmt: skip
def test_a_template_that_does_not_end(source, monkeypatch):
    monkeypatch.setattr(template_process, "SECONDS", 1)
    with pytest.raises(ValueError, match=r"the chat template takes more than 1 s: correct"):
        render(source)
    assert render("{{ messages[0].content }}") == "hi"


def test_a_forked_process_has_its_own():
    assert render("{{ 1 }}") == "1"
    child = template_process._PROCESS._child.pid
    pid = os.fork()
    if pid == 0:
        other = render("{{ 2 }}") == "2" and template_process._PROCESS._child.pid != child
        template_process._PROCESS.end()
        os._exit(0 if other else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert render("{{ 3 }}") == "3" and template_process._PROCESS._child.pid == child


def test_it_ends_with_its_parent():
    import subprocess
    import sys

    code = (
        "import os; from llmx.data import template_process as t; t.ask('{{ 1 }}', ('b', 'e'), {});"
        "print(t._PROCESS._child.pid, flush=True); os._exit(0)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}"):
            break
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
