"""A local S3 server (moto) behind a proxy that answers wrongly, late or never, as it is told."""

import contextlib
import http.client
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator

SECONDS = 120.0  # until the server answers
_EMPTY = (
    b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns='
    b'"http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name><KeyCount>0</KeyCount>'
    b"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated></ListBucketResult>"
)
_CODES = {403: "AccessDenied", 404: "NoSuchBucket", 500: "InternalError", 503: "SlowDown"}


class Request:
    """What the proxy was asked: "GET", "runs/a/metrics.jsonl", and whether it is a listing."""

    def __init__(self, method: str, target: str):
        parts = urllib.parse.urlsplit(target)
        query = urllib.parse.parse_qs(parts.query, keep_blank_values=True)
        self.method = method
        self.key = urllib.parse.unquote(parts.path).removeprefix("/bucket").strip("/")
        self.is_listing = method == "GET" and ("list-type" in query or "prefix" in query)

    @property
    def is_write(self) -> bool:
        return self.method in ("PUT", "POST", "DELETE")

    def reads(self, text: str) -> bool:
        """Whether it asks for an object with the text in its name."""
        return self.method == "GET" and not self.is_listing and text in self.key


# What is done to a request: a status (403), "empty" (a listing), "cut" or "short" (half of the
# body, of the length that was stated or of its own), "flip" (a bit of the body), "reset", "never",
# seconds as a float, or None.
Fault = int | str | float | None


class FaultyStore:
    """The proxy. `fault` may be set at any time; `environment` are the variables that name it."""

    def __init__(self, port_of_server: int):
        self.fault: Callable[[Request], Fault] = lambda request: None
        self.requests: list[Request] = []
        self._over = threading.Event()
        store = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                request = Request(self.command, self.path)
                store.requests.append(request)
                store._answer(self, request, store.fault(request), body, port_of_server)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {
            "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()

    def heal(self) -> None:
        self.fault = lambda request: None

    def _answer(
        self, to: http.server.BaseHTTPRequestHandler, request: Request, fault: Fault, body: bytes,
        port: int,
    ) -> None:  # fmt: skip
        if fault == "never":
            self._over.wait()
        if fault in ("never", "reset"):
            to.close_connection = True
            to.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            return to.connection.close()
        if isinstance(fault, float):
            self._over.wait(fault)
        if isinstance(fault, int):
            text = f"<Error><Code>{_CODES[fault]}</Code><Message>as told</Message></Error>"
            return _send(to, fault, {"Content-Type": "application/xml"}, text.encode())
        if fault == "empty":
            return _send(to, 200, {"Content-Type": "application/xml"}, _EMPTY)
        server = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        with contextlib.closing(server):
            server.request(to.command, to.path, body or None, dict(to.headers.items()))
            answer = server.getresponse()
            headers, body = dict(answer.getheaders()), answer.read()
        length = len(body)
        if fault == "flip" and body:
            middle = length // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        if fault in ("cut", "short"):
            body = body[: length // 2]
            length = len(body) if fault == "short" else length
        _send(to, answer.status, headers, body, length)
        if fault == "cut":
            to.close_connection = True


def _send(
    to: http.server.BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes,
    length: int | None = None,
) -> None:  # fmt: skip
    to.send_response_only(status)
    dropped = ("transfer-encoding", "connection", "content-length")
    stated = {name.lower(): text for name, text in headers.items()}
    if to.command == "HEAD":
        dropped = dropped[:2]
    else:
        to.send_header("Content-Length", str(len(body) if length is None else length))
    for name, text in stated.items():
        if name not in dropped:
            to.send_header(name, text)
    to.end_headers()
    if to.command != "HEAD":
        to.wfile.write(body)


@contextlib.contextmanager
def started() -> Iterator[FaultyStore]:
    """The server with an empty bucket "bucket", and the proxy before it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + SECONDS
        while True:
            assert time.monotonic() < deadline and server.poll() is None
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
                with contextlib.closing(connection):
                    connection.request("PUT", "/bucket")
                    if connection.getresponse().status == 200:
                        break
            time.sleep(0.2)
        store = FaultyStore(port)
        try:
            yield store
        finally:
            store.close()
    finally:
        server.kill()
        server.wait()


def variables(store: FaultyStore) -> dict[str, str]:
    """The environment of a process that uses the store."""
    return dict(os.environ) | store.environment
