"""What ranks tell each other, pickled: each message carries a code that only a holder of the run's key can compute.

It is unpickled after the code was checked, so that whoever reaches a port of the run cannot run code in it. Tensors
carry no code, and nothing is encrypted: PyTorch leaves that to the network.

Source: HMAC, RFC 2104; "Using distributed features" in PyTorch's SECURITY.md; tcp(7).
"""

import hashlib
import hmac
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bridge.errors import RankError

CODE_BYTES = hashlib.sha256().digest_size
SILENCE_S = 30
"""A connection to a host that lost its power is given up after this time; gloo alone would wait for its limit."""
gather_bytes: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renamed it."""


class Messages:
    """The messages of one rank of a run."""

    def __init__(self, rank: int, size: int, key: bytes) -> None:
        self._rank, self._size, self._key = rank, size, key
        self.count = 0
        """Of the messages that every rank has sent."""

    def exchanged(self, mine: object, group: "dist.ProcessGroup") -> list[Any]:
        """Send `mine` to every rank of `group`, and return what each sent, in the order of the ranks.

        Raises:
            RankError: something else than a rank of this run sent it.
        """
        message = pickle.dumps(mine)
        sealed = self._code(self._rank, message) + message
        lengths = torch.empty(self._size, dtype=torch.int64)
        gather_bytes(lengths, torch.tensor([len(sealed)]), group=group)
        longest = int(lengths.max())
        padded, whole = torch.zeros(longest, dtype=torch.uint8), torch.empty(self._size * longest, dtype=torch.uint8)
        padded[: len(sealed)] = torch.frombuffer(bytearray(sealed), dtype=torch.uint8)
        gather_bytes(whole, padded, group=group)
        rows = zip(whole.view(self._size, longest), lengths.tolist(), strict=True)
        messages = [self._opened(rank, row[:length].numpy().tobytes()) for rank, (row, length) in enumerate(rows)]
        self.count += 1
        return [pickle.loads(each) for each in messages]  # noqa: S301  all codes were checked

    def _opened(self, rank: int, sealed: bytes) -> bytes:
        code, message = sealed[:CODE_BYTES], sealed[CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(rank, message)):
            raise RankError(
                f"rank {self._rank} of {self._size}: what came in the place of rank {rank} was not sent by this run",
                remedy="another process reaches the ports of this run: use a network that you trust",
            )
        return message

    def _code(self, rank: int, message: bytes) -> bytes:
        """Return the code of the next message of `rank`: it is valid once, and for that rank alone."""
        return hmac.digest(self._key, f"{rank} {self.count} ".encode() + message, "sha256")


@contextmanager
def noticing_silence() -> Iterator[None]:
    """Let the kernel end every connection made in the block whose other side does not answer for `SILENCE_S`."""
    before = sockets()
    yield
    for descriptor in sockets() - before:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 6)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def sockets() -> set[int]:
    """Return the descriptors of this process that are sockets."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(descriptor.readlink()).startswith("socket:"):
                found.add(int(descriptor.name))
    return found
