"""Chat templates, run in a process of their own with bounds of time and memory.

A template is a program that comes with a tokenizer. Jinja's sandbox keeps it from files and from
the interpreter, not from loops that do not end or strings that fill the memory. The process reads
requests from its standard input, a line of JSON each, answers in the same way, and ends with the
process that started it. The system ends it where a request takes too much.
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
from typing import Any

SECONDS = 5  # of a processor, for one request
BYTES = 1 << 30  # of address space
_REMEDY = "correct the template, or set data.chat_template to another"


class _Process:
    """The one process of templates; started when it is first asked, and again where it ended."""

    def __init__(self):
        self._lock, self._child = threading.Lock(), None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request. Raises ValueError where it took too much."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._start()
            try:
                with contextlib.suppress(BrokenPipeError):
                    self._child.stdin.write(line)
                    self._child.stdin.flush()
                answer = self._child.stdout.readline()
            except BaseException:  # an interrupt: what comes next would answer an old request
                self.end()
                raise
            if not answer.endswith(b"\n"):
                late = self.end() == -signal.SIGXCPU
                limit = f"{SECONDS} s" if late else f"{BYTES >> 20} MiB"
                raise ValueError(f"the chat template takes more than {limit}: {_REMEDY}")
        return json.loads(answer)

    def _start(self) -> None:
        path = json.dumps(sys.path)
        code = f"import sys; sys.path[:] = {path}; from {__name__} import serve; serve()"
        self._child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

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


def ask(source: str, marks: tuple[str, str], values: dict[str, Any] | None = None) -> dict:
    """What a template makes of values; without values, which names it reads.

    marks: written before and behind what stands in `{% generation %}`. The answer has `text`, or
    `variables` (names that it takes from outside) and `words` (all names and strings in it), or
    `refused`, with `line` where the source is no Jinja. Raises ValueError where it takes too much.
    """
    request = {"source": source, "marks": marks, "values": values, "seconds": SECONDS}
    return _PROCESS.ask(request)


# ---- in the process


def serve() -> None:
    """Answers requests until the input ends."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and ends the input
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = BYTES if most == resource.RLIM_INFINITY else min(BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        seconds = int(time.process_time()) + 1 + request.pop("seconds")
        if most == resource.RLIM_INFINITY or seconds < most:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, most))
        try:
            answer = json.dumps(_answer(**request))
        except MemoryError:
            return  # nothing can be relied on after it
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()


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
