"""Chat templates that take too much: an error soon, and the next one works."""

import os
import signal
import sys
import time

import pytest

from llmx.data import chat, documents, template_process, tokenizers, transient
from llmx.data import sources as sources_lib

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

    code = (
        "import os; from llmx.data import template_process as t; t.ask('{{ 1 }}', ('b', 'e'));"
        "print(t._PROCESS._child.pid, flush=True); os._exit(0)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}"):
            break
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


def test_signals_to_the_job_do_not_end_it():
    assert render("{{ 1 }}") == "1"
    child = template_process._PROCESS._child.pid
    assert os.getpgid(child) != os.getpgid(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(child, number)
    assert render("{{ 2 }}") == "2" and template_process._PROCESS._child.pid == child


def test_a_killed_one_is_asked_again(monkeypatch):
    template = chat.Template("{{ messages[0].content }}", tokenizers.ByteTokenizer())
    child = template_process._PROCESS._child
    monkeypatch.setattr(child, "poll", lambda: None)  # as if it was killed just behind that
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert template.render(TALK).text == "hi"
    assert template_process._PROCESS._child.pid != child.pid


@pytest.mark.parametrize("ends", ["kill(os.getpid(), 15)", "kill(os.getpid(), 9)", "_exit(1)"])
def test_what_ends_it_twice_is_no_fault_of_a_record(ends, tmp_path, monkeypatch):
    """So that no record is left out by data.skip_bad, and nothing written is cleared."""
    template = chat.Template("{{ messages[0].content }}", tokenizers.ByteTokenizer())
    template_process._PROCESS.end()
    text = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    (tmp_path / "a.jsonl").write_text(text)
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport os\nos.{ends}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    files, skipped = sources_lib.list_files(str(tmp_path / "a.jsonl")).files, {}
    found = documents.read_documents(
        files, text_key="text", skip_bad=True, skipped=skipped,
        render=lambda record: chat.read_record(record, template),
    )  # fmt: skip
    with pytest.raises(transient.Transient, match=r"^the process of chat templates was ended"):
        list(found)
    assert not skipped


def test_a_template_is_sent_once_and_asked_for_a_conversation_at_once(monkeypatch):
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template = chat.Template(source + "{# no more #}", tokenizers.ByteTokenizer())
    asked, ask = [], template_process._Process._answer
    monkeypatch.setattr(
        template_process._Process, "_answer",
        lambda self, *given: asked.append(self._numbers.copy()) or ask(self, *given),
    )  # fmt: skip
    talk = chat.Conversation([*TALK, {"role": "assistant", "content": "yes"}] * 20)
    assert len(template.render_to_learn(talk).learned) == 20
    assert len(asked) == 2 and all(template.source in known for known in asked)
    monkeypatch.setattr(chat, "_TOGETHER", 1)
    one_by_one = template.render_to_learn(talk)
    assert len(asked) == 23 and one_by_one == template.render_to_learn(talk)
    template_process._PROCESS.end()  # the next one knows it not
    assert template.render_to_learn(talk) == one_by_one
