"""Chat templates, run in a process of their own with bounds of time and memory.

A template is a program that comes with a tokenizer. Jinja's sandbox keeps it from files and from
the interpreter, not from loops that do not end or strings that fill the memory. The process reads
requests from its standard input, a line of JSON each, answers in the same way, and ends when that
closes, as it does with the process that started it: signals to a job are for that one. The system
ends it where a request takes too much; any other end says nothing of a template.
"""

import atexit
import contextlib
import datetime
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from llmx.data import transient

SECONDS = 5  # of a processor, for one request
BYTES = 1 << 30  # of address space
_NO_MEMORY = 77  # the exit code of the process where a request took too much of it
_REMEDY = "correct the template, or set data.chat_template to another"


class Ended(transient.Transient):
    """The process was ended from outside, twice."""


class _Process:
    """The one process of templates; started when it is first asked, and again where it ended."""

    def __init__(self):
        self._lock, self._child = threading.Lock(), None
        self._numbers: dict[str, int] = {}  # of the templates that it knows

    def ask(self, source: str, request: dict[str, Any]) -> list[dict[str, Any]]:
        """The answers to a request. Raises ValueError where one took too much, and Ended."""
        with self._lock:
            for _ in range(2):
                try:
                    answer = self._answer(source, request)
                except BaseException:  # an interrupt: what comes next would answer an old request
                    self.end()
                    raise
                if answer.endswith(b"\n"):
                    return json.loads(answer)
                code = self.end()
                if code in (-signal.SIGXCPU, _NO_MEMORY):
                    limit = f"{SECONDS} s" if code < 0 else f"{BYTES >> 20} MiB"
                    raise ValueError(f"the chat template takes more than {limit}: {_REMEDY}")
        raise Ended(
            f"the process of chat templates was ended from outside twice (exit code {code})"
        )

    def _answer(self, source: str, request: dict[str, Any]) -> bytes:
        """The line that the process answers, or less where it has ended."""
        if self._child is None or self._child.poll() is not None:
            self.end()
            self._start()
        known = source in self._numbers
        number = self._numbers.setdefault(source, len(self._numbers))
        request = {**request, "number": number, "source": None if known else source}
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        return self._child.stdout.readline()

    def _start(self) -> None:
        path = json.dumps(sys.path)
        code = f"import sys; sys.path[:] = {path}; from {__name__} import serve; serve()"
        self._child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        self._numbers = {}

    def end(self) -> int:
        """Ends the process, if there is one; its exit status."""
        child, self._child = self._child, None
        if child is None:
            return 0
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        # Without a whole answer it is ending; between requests it ends with its input.
        try:
            code = child.wait(timeout=2)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        child.stdout.close()
        return code


_PROCESS = _Process()
atexit.register(_PROCESS.end)
# A forked process must not write into the pipe of the first.
os.register_at_fork(after_in_child=_PROCESS.__init__)


def ask(
    source: str, marks: tuple[str, str], values: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:  # fmt: skip
    """What a template makes of each of `values`; without any, which names it reads.

    marks: written before and behind what stands in `{% generation %}`. An answer has `text`, or
    `variables` (names that it takes from outside) and `words` (all names and strings in it), or
    `refused`, with `line` where the source is no Jinja. Raises ValueError where one takes too much.
    """
    return _PROCESS.ask(source, {"marks": marks, "values": [*values] or [None], "seconds": SECONDS})


# ---- in the process


def serve() -> None:
    """Answers requests until the input ends."""
    import resource

    # They are for the process that started this one, which ends the input.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = BYTES if most == resource.RLIM_INFINITY else min(BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sources: dict[int, str] = {}
    try:
        for line in sys.stdin.buffer:
            request = json.loads(line)
            number, source = request["number"], request["source"]
            sources[number] = source = sources[number] if source is None else source
            answers = []
            for values in request["values"]:
                _limit_time(request["seconds"])
                answers.append(_answer(source, request["marks"], values))
            sys.stdout.buffer.write(json.dumps(answers).encode() + b"\n")
            sys.stdout.buffer.flush()
    except MemoryError:
        os._exit(_NO_MEMORY)  # nothing can be relied on after it


def _limit_time(seconds: int) -> None:
    """Lets the system end this process when it has taken so much more of a processor."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    end = int(time.process_time()) + 1 + seconds
    if most == resource.RLIM_INFINITY or end < most:
        resource.setrlimit(resource.RLIMIT_CPU, (end, most))


def _answer(source: str, marks: list[str], values: dict[str, Any] | None) -> dict[str, Any]:
    import jinja2

    try:
        if values is None:
            return _names(source, *marks)
        return {"text": _compiled(source, *marks).render(values)}
    except jinja2.TemplateSyntaxError as error:
        return {"refused": error.message, "line": error.lineno}
    except MemoryError:
        raise
    except Exception as error:  # whatever an expression of the template raises
        return {"refused": str(error) or type(error).__name__}


@functools.lru_cache(maxsize=8)
def _compiled(source: str, begin: str, end: str) -> Any:
    return _environment(begin, end).from_string(source)


def _names(source: str, begin: str, end: str) -> dict[str, Any]:
    from jinja2 import meta, nodes

    _compiled(source, begin, end)
    environment = _environment(begin, end)
    tree = environment.parse(source)
    words = {node.attr for node in tree.find_all(nodes.Getattr)}
    words |= {node.name for node in tree.find_all(nodes.Name)}
    constants = (node.value for node in tree.find_all(nodes.Const))
    words |= {value for value in constants if isinstance(value, str)}
    variables = meta.find_undeclared_variables(tree) - environment.globals.keys()
    return {"variables": sorted(variables), "words": sorted(words)}


@functools.lru_cache(maxsize=1)
def _environment(begin: str, end: str) -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`: marks what the model itself writes."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller) -> str:
            return f"{begin}{caller()}{end}"

    def refuse(message: str):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # Jinja's own escapes HTML.
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
            sort_keys=sort_keys,
        )  # fmt: skip

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
