"""Files sent between the processes of a run, in the background, while the devices compute.

Plain TCP: a collective of the devices would have to take its place in the order of the step's own.
Every process listens at the address by which the others reach it. Both ends of a connection prove
that they know the run's token (HMAC of the other's random bytes); what is sent is not encrypted.
"""

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

PATIENCE_SECONDS = 60  # for a peer that sends and takes nothing
GREETING_SECONDS = 10
CHUNK = 4 * 2**20
LENGTH = struct.Struct("<I")
MOST_TEXT = 2**20  # bytes of a message that is not data


class Refused(OSError):
    """The other process does not do what it was asked for."""


class Server:
    """Takes files that other processes send, and hands out those that they ask for.

    Args:
      bind: the address to listen at.
      token: what all processes of the run know, and no other program.
      take: (message, chunks of bytes) -> None; stores what was sent.
      give: message -> chunks of bytes; raises OSError where there is nothing to give.
    """

    def __init__(
        self, bind: str, token: bytes, *,
        take: Callable[[dict, Iterator[bytes]], None],
        give: Callable[[dict], Iterable[bytes]],
    ) -> None:  # fmt: skip
        self._token, self._take, self._give = token, take, give
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._socket = socket.create_server((bind, 0), family=family)
        self.address = (bind, self._socket.getsockname()[1])
        threading.Thread(target=self._listen, daemon=True, name="local tier").start()

    def close(self) -> None:
        # Wakes up the thread in accept, which a close alone does not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # A peer that vanishes, or a stranger: nothing to do for it, and the peer reports its part.
        with contextlib.suppress(OSError, ValueError), connection:
            connection.settimeout(GREETING_SECONDS)
            _greet(connection, self._token, b"server", b"client")
            connection.settimeout(PATIENCE_SECONDS)
            message = _receive_text(connection)
            try:
                if message["verb"] == "put":
                    self._take(message, _receive_data(connection))
                    _send_text(connection, {})
                else:
                    chunks = self._give(message)
                    _send_text(connection, {})
                    _send_data(connection, chunks)
            except Exception as error:
                _send_text(connection, {"error": f"{type(error).__name__}: {error}"})
                raise


def put(address: tuple[str, int], token: bytes, message: dict, chunks: Iterable[bytes]) -> None:
    """Sends data to the process at `address`; returns when it has stored it. Raises OSError."""
    with _connected(address, token) as connection:
        _send_text(connection, message | {"verb": "put"})
        _send_data(connection, chunks)
        _check(_receive_text(connection))


def get(address: tuple[str, int], token: bytes, message: dict) -> Iterator[bytes]:
    """The data that the process at `address` gives for `message`. Raises OSError."""
    with _connected(address, token) as connection:
        _send_text(connection, message | {"verb": "get"})
        _check(_receive_text(connection))
        yield from _receive_data(connection)


def route(to: str, port: int = 9) -> str:
    """The address of this machine on the network by which it reaches the host `to`."""
    family, kind, _, _, target = socket.getaddrinfo(to, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        return probe.getsockname()[0]


@contextlib.contextmanager
def _connected(address: tuple[str, int], token: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(tuple(address), PATIENCE_SECONDS) as connection:
        _greet(connection, token, b"client", b"server")
        yield connection


def _greet(connection: socket.socket, token: bytes, own: bytes, other: bytes) -> None:
    """Both prove that they know the token; raises Refused."""
    mine = os.urandom(32)
    connection.sendall(mine)
    theirs = _receive(connection, 32)
    connection.sendall(hmac.digest(token, own + mine + theirs, hashlib.sha256))
    expected = hmac.digest(token, other + theirs + mine, hashlib.sha256)
    if not hmac.compare_digest(_receive(connection, 32), expected):
        raise Refused("the other end of the connection is no process of this run")


def _check(answer: dict) -> None:
    if "error" in answer:
        raise Refused(answer["error"])


def _send_text(connection: socket.socket, message: dict) -> None:
    text = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(text)) + text)


def _receive_text(connection: socket.socket) -> Any:
    (length,) = LENGTH.unpack(_receive(connection, LENGTH.size))
    if length > MOST_TEXT:
        raise Refused(f"a message of {length} bytes")
    return json.loads(_receive(connection, length))


def _send_data(connection: socket.socket, chunks: Iterable[bytes]) -> None:
    """Chunks, each with its length and CRC-32 (that of TCP misses some errors); 0 ends them."""
    for chunk in chunks:
        for begin in range(0, len(chunk), CHUNK):
            part = chunk[begin : begin + CHUNK]
            connection.sendall(LENGTH.pack(len(part)) + LENGTH.pack(zlib.crc32(part)))
            connection.sendall(part)
    connection.sendall(LENGTH.pack(0))


def _receive_data(connection: socket.socket) -> Iterator[bytes]:
    while True:
        (length,) = LENGTH.unpack(_receive(connection, LENGTH.size))
        if not length:
            return
        if length > CHUNK:
            raise Refused(f"a chunk of {length} bytes")
        (crc,) = LENGTH.unpack(_receive(connection, LENGTH.size))
        chunk = _receive(connection, length)
        if zlib.crc32(chunk) != crc:
            raise Refused("bytes changed on their way")
        yield chunk


def _receive(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise ConnectionError("the connection was closed")
        view = view[received:]
    return data
