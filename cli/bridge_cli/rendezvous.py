"""Where the hosts of one run meet: the host that has the address of `--rendezvous` listens, the others connect to it.

Each message is a line of JSON behind a code that only a holder of BRIDGE_SECRET can compute, from random numbers of
both sides. Nothing is parsed before its code was checked.

Not covered: what must be equal on all hosts (`alike.py`), and what ranks tell each other (`bridge/ranks/messages.py`).

Source: HMAC, RFC 2104. The time limit is that of torchrun's rendezvous.
"""

import contextlib
import errno
import hmac
import ipaddress
import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from bridge.config import TrainConfig
from bridge.config.choices import HOSTS_KNOW
from bridge.core import private
from bridge.errors import RankError, UsageError
from bridge_cli import alike, console
from bridge_cli.serve import holder

LIMIT_S = 600.0
"""Longest wait for all hosts."""
ANSWER_LIMIT_S = 10.0
"""Longest greeting, from the connection to the first message of the other side."""
MOST_GREETINGS = 64
"""Connections that are greeted at once; a host needs milliseconds."""
POLL_S = 0.2
LEAST_SECRET = 16
MOST_BYTES = 2**20
LOOPBACK = "127.0.0.1"
FIRST, OTHER = b"first", b"other"
GENERATE = f"export {HOSTS_KNOW}=$(openssl rand -hex 16) on one host, and the same value on the others"


@dataclass(frozen=True)
class Met:
    """What this host knows once all have met."""

    host: int
    """Its number: ranks [host * gpus, (host + 1) * gpus) are here."""
    address: str
    port: int
    key: bytes
    """Known to the ranks of this run alone."""
    interface: str | None
    """The network interface on which this host can be reached; None: unknown."""
    listener: socket.socket | None = None
    """Listens at `port`, on the first host."""
    lines: "tuple[_Line, ...]" = ()
    """The connections between the first host and the others."""
    num_hosts: int = 1

    @classmethod
    def alone(cls) -> "Met":
        """Return what one host knows by itself: its ranks meet on the loopback interface."""
        listener = socket.create_server((LOOPBACK, 0))
        return cls(0, LOOPBACK, listener.getsockname()[1], secrets.token_bytes(), "lo", listener)

    def lost(self) -> str | None:
        """Return the name of another host that has ended, as far as this one can see."""
        return next((line.name for line in self.lines if line.is_closed()), None)


class _StrangerError(Exception):
    """The other side does not know the secret, or does not speak like a host of a run."""


class _Line:
    """A connection between two hosts of one run."""

    def __init__(self, connection: socket.socket, secret: bytes, role: bytes) -> None:
        """Greet the other side: `role` is FIRST where the connection was accepted."""
        self._connection, self._role = connection, role
        self.name = "the first host"
        self._received_bytes = b""
        self._deadline = time.monotonic() + ANSWER_LIMIT_S
        connection.settimeout(ANSWER_LIMIT_S)
        own = secrets.token_hex().encode()
        connection.sendall(b"bridge " + own + b"\n")
        word, _, theirs = self._read().partition(b" ")
        if word != b"bridge" or len(theirs) != len(own):
            raise _StrangerError
        numbers = (own, theirs) if role == FIRST else (theirs, own)
        self._key = hmac.digest(secret, b" ".join(numbers), "sha256")
        self._sent = self._received = 0

    def send(self, message: Mapping[str, Any]) -> None:
        body = json.dumps(message).encode()
        self._connection.sendall(self._code(self._role, self._sent, body) + b" " + body + b"\n")
        self._sent += 1

    def receive(self, limit_s: float | None = None) -> dict[str, Any]:
        """Return the next message of the other side; without `limit_s` it is part of the greeting.

        Raises:
            OSError: it has closed the connection, or the message has not arrived in time.
            _StrangerError: it does not know the secret, or sent something else.
        """
        if limit_s is not None:
            self._deadline = time.monotonic() + limit_s
        code, _, body = self._read().partition(b" ")
        expected = self._code(OTHER if self._role == FIRST else FIRST, self._received, body)
        if not hmac.compare_digest(code, expected):
            raise _StrangerError
        self._received += 1
        message: dict[str, Any] = json.loads(body)
        if not isinstance(message, dict):
            raise _StrangerError
        return message

    def is_closed(self) -> bool:
        """Return whether the other side has ended: nothing is sent once all hosts have met."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._connection.close()

    def own_address(self) -> str:
        return str(self._connection.getsockname()[0])

    def _read(self) -> bytes:
        """Return the next line; the whole of it, and not each of its bytes, has to arrive before the deadline."""
        while b"\n" not in self._received_bytes:
            self._connection.settimeout(max(self._deadline - time.monotonic(), 0.001))
            piece = self._connection.recv(2**16)
            if not piece or len(self._received_bytes) > MOST_BYTES:
                raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
            self._received_bytes += piece
        line, _, self._received_bytes = self._received_bytes.partition(b"\n")
        return line

    def _code(self, role: bytes, count: int, body: bytes) -> bytes:
        return hmac.new(self._key, b"%s %d " % (role, count) + body, "sha256").hexdigest().encode()


class Rendezvous:
    """The place where the hosts meet, seen from this host."""

    def __init__(self, hosts: int, host: str, port: int, secret: bytes) -> None:
        """Listen there if the address is this host's."""
        self._hosts, self._host, self._port, self.secret = hosts, host, port, secret
        self.name = f"{host}:{port}"
        self._listener = self._bound()
        self._here: list[tuple[_Line, dict[str, Any]]] = []
        self._strangers = 0
        self._greetings: list[socket.socket] = []
        """Connections that are being greeted, the oldest first."""
        self._is_over = threading.Event()
        self._greeter = threading.Thread(target=self._greet_all, name="rendezvous", daemon=True)
        if self.is_first:
            self._greeter.start()

    @property
    def is_first(self) -> bool:
        """Whether the first rank is on this host."""
        return self._listener is not None

    def gather(self, facts: alike.Facts, run_dir: str, *, limit_s: float = LIMIT_S) -> Met:
        """Wait for the other hosts on the first one; `facts` must be the same on all.

        Raises:
            UsageError: they differ, or not all came.
        """
        assert self._listener is not None, "another host is the first"
        lines = self._others(facts, limit_s)
        self._end_greeting()
        for line, _ in self._here:
            with contextlib.suppress(OSError):
                line.send({"refused": f"all {self._hosts} hosts of the run at {self.name} are there already"})
        number = secrets.token_hex()
        for host, line in enumerate(lines, start=1):
            with contextlib.suppress(OSError):  # it is found to have ended
                line.send({"host": host, "run_dir": run_dir, "run": number})
        listener, self._listener = self._listener, None
        listener.settimeout(None)
        return self._met(0, listener.getsockname()[0], number, listener, tuple(lines))

    def _others(self, facts: alike.Facts, limit_s: float) -> list[_Line]:
        """Return the lines of all other hosts, once they have come."""
        lines: list[_Line] = []
        deadline = time.monotonic() + limit_s
        with console.waiting(f"waiting for the other hosts at {self.name}") as detail:
            while True:
                lines = [line for line in lines if not line.is_closed()]
                detail(f"{len(lines)} of {self._hosts - 1}")
                if len(lines) == self._hosts - 1:
                    return lines
                if time.monotonic() > deadline:
                    raise self._incomplete(len(lines) + 1, limit_s)
                if not self._here:
                    time.sleep(POLL_S)
                    continue
                line, theirs = self._here.pop(0)
                line.name = theirs[alike.HOST]
                lines.append(line)
                if fault := alike.difference(facts, theirs):
                    for each in lines:
                        with contextlib.suppress(OSError):
                            each.send({"refused": fault})
                    raise UsageError(fault, remedy=alike.REMEDY)

    def attend(self, facts: alike.Facts, *, limit_s: float = LIMIT_S) -> tuple[Met, str]:
        """Go to the first host, and return what all know and the run directory, once all hosts are there.

        Raises:
            UsageError: nobody answers there, somebody else does, or the hosts differ.
            RankError: the first host has ended.
        """
        began = time.monotonic()
        with console.waiting(f"waiting for the other hosts at {self.name}"):
            line = self._line(began + limit_s)
            try:
                line.send(facts)
                line.receive()
            except (OSError, _StrangerError) as error:
                raise UsageError(
                    f"--rendezvous {self.name}: the host there has another {HOSTS_KNOW}", remedy=GENERATE
                ) from error
            try:
                answer = line.receive(limit_s)
            except (OSError, _StrangerError) as error:
                raise RankError(
                    f"the first host, at {self.name}, ended before all {self._hosts} hosts had come",
                    remedy="its output says why; then start the command on all hosts again",
                ) from error
        if "refused" in answer:
            raise UsageError(answer["refused"], remedy=alike.REMEDY)
        return self._met(answer["host"], line.own_address(), answer["run"], None, (line,)), answer["run_dir"]

    def close(self) -> None:
        """Stop listening."""
        self._end_greeting()
        for line, _ in self._here:
            line.close()
        if self._listener is not None:
            self._listener.close()

    def _bound(self) -> socket.socket | None:
        try:
            family, *_, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror as error:
            raise UsageError(
                f"--rendezvous {self.name}: there is no host {self._host}: {error.strerror}",
                remedy="give the address of one of the hosts, such as --rendezvous 10.0.0.1:29400",
            ) from error
        found = ipaddress.ip_address(str(address[0]).partition("%")[0])
        if found.is_unspecified or (found.is_loopback and self._host not in (str(found), "localhost")):
            raise UsageError(
                f"--rendezvous {self.name} is {found} on this host, where no other host can reach it",
                remedy="give the address of one of the hosts, such as --rendezvous 10.0.0.1:29400",
            )
        try:
            listener = socket.create_server(address[:2], family=family)
        except PermissionError as error:
            raise UsageError(f"port {self._port} is reserved for root", remedy="choose 1024 or higher") from error
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                return None
            raise UsageError(f"--rendezvous {self.name}: {error.strerror}", remedy="choose another address") from error
        listener.settimeout(POLL_S)
        return listener

    def _greet_all(self) -> None:
        """Answer every connection, until all hosts have met."""
        assert self._listener is not None
        while not self._is_over.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._listener.fileno() < 0:  # closed
                    return
                time.sleep(POLL_S)  # there may be file descriptors again
                continue
            for oldest in self._greetings[: 1 - MOST_GREETINGS]:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread raises, and closes it
            self._greetings.append(connection)
            threading.Thread(target=self._greet, args=(connection,), name="greeting", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """Answer one connection; one without the secret, or one that sends nothing, delays no other."""
        try:
            line = _Line(connection, self.secret, FIRST)
            hello = line.receive()
            if alike.HOST not in hello or not all(isinstance(fact, str) for fact in hello.values()):
                raise _StrangerError
            line.send({})
        except (OSError, ValueError, _StrangerError):
            self._strangers += 1
            connection.close()
        else:
            self._here.append((line, hello))
        finally:
            self._greetings.remove(connection)

    def _end_greeting(self) -> None:
        self._is_over.set()
        if self._greeter.ident:
            self._greeter.join()

    def _line(self, deadline: float) -> _Line:
        """Connect to the first host, as soon as it listens."""
        while True:
            try:
                connection = socket.create_connection((self._host, self._port), ANSWER_LIMIT_S)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"--rendezvous {self.name}: no host answers there ({error.strerror or error})",
                        remedy="give an address of one of the hosts, open that port, and start the command there",
                    ) from error
                time.sleep(POLL_S)
                continue
            try:
                return _Line(connection, self.secret, OTHER)
            except (OSError, _StrangerError) as error:
                connection.close()
                raise UsageError(
                    f"--rendezvous {self.name}: what listens there is no `bridge run` that waits for hosts"
                    f"{holder(self._port)}",
                    remedy="choose a free port, the same on every host",
                ) from error

    def _met(
        self, host: int, address: str, number: str, listener: socket.socket | None, lines: tuple[_Line, ...]
    ) -> Met:
        key = hmac.digest(self.secret, b"run " + number.encode(), "sha256")
        return Met(host, self._host, self._port, key, _interface(address), listener, lines, self._hosts)

    def _incomplete(self, count: int, limit_s: float) -> UsageError:
        strangers = f"had another {HOSTS_KNOW}, or were not a `bridge run`"
        others = f"; {self._strangers} connections {strangers}" if self._strangers else ""
        return UsageError(
            f"{count} of {self._hosts} hosts came to {self.name} within {limit_s:.0f} s{others}",
            remedy="start the same command on each host, and see that they can reach this address and port",
        )


@contextlib.contextmanager
def opened(train: TrainConfig) -> Iterator[Rendezvous | None]:
    """Yield the place where the hosts of the run meet; None on one host.

    Raises:
        UsageError: the place is missing, cannot be used, or there is no secret.
    """
    if train.hosts == 1:
        if train.rendezvous is not None:
            raise UsageError(f"--rendezvous {train.rendezvous} has no effect on one host", remedy="add --hosts H")
        yield None
        return
    host, colon, port = (train.rendezvous or "").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        found = "none was given" if train.rendezvous is None else f"found {train.rendezvous}"
        raise UsageError(
            f"--hosts {train.hosts} needs --rendezvous HOST:PORT, {found}",
            remedy="give an address of one of the hosts and a free port there, such as --rendezvous 10.0.0.1:29400",
        )
    place = Rendezvous(train.hosts, host, int(port), _secret())
    try:
        yield place
    finally:
        place.close()


def _secret() -> bytes:
    """Return what the hosts know.

    Raises:
        UsageError: it is missing, or can be guessed.
    """
    secret = os.environ.pop(HOSTS_KNOW, "")  # no server and no reward needs it
    private.hide_environment()
    if len(secret) < LEAST_SECRET:
        found = f"has {len(secret)} characters, expected at least {LEAST_SECRET}" if secret else "is not set"
        raise UsageError(f"{HOSTS_KNOW} {found}: the hosts know each other by it", remedy=GENERATE)
    return secret.encode()


def _interface(address: str) -> str | None:
    """Return the network interface that has `address`."""
    found = [name for name, each in psutil.net_if_addrs().items() if any(one.address == address for one in each)]
    return found[0] if found else None
