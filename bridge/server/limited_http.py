"""Limit the size of an HTTP response, and the time until it is complete.

httpx limits only the wait for each chunk: reading from a server that sends forever, or a byte a second, never ends.
"""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import httpx

MAX_BYTES = 2**26
"""Largest response of a control route; the longest one, digests of all weights, has a few MiB."""
MAX_SAMPLED_BYTES = 2**33
"""Largest response with completions; those of a large group, with the experts of every token, have a few GiB."""
IDENTITY = "identity"


class LimitedTransport(httpx.BaseTransport):
    """Raises an `httpx.TransportError` for a response that is too large, too slow or compressed.

    The request's read timeout applies to the response as a whole.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, **options: Any) -> None:
        self._inner = httpx.HTTPTransport(**options)
        self._max_bytes = max_bytes

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        limits = _Limits(request, self._max_bytes)
        response = self._inner.handle_request(request)
        response.stream = _Stream(response, limits)
        return response

    def close(self) -> None:
        self._inner.close()


class AsyncLimitedTransport(httpx.AsyncBaseTransport):
    """Limits the responses to an asynchronous client."""

    def __init__(self, max_bytes: int = MAX_SAMPLED_BYTES, **options: Any) -> None:
        self._inner = httpx.AsyncHTTPTransport(**options)
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        limits = _Limits(request, self._max_bytes)
        response = await self._inner.handle_async_request(request)
        response.stream = _AsyncStream(response, limits)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Limits:
    """Limits of one response."""

    def __init__(self, request: httpx.Request, max_bytes: int) -> None:
        request.headers["accept-encoding"] = IDENTITY
        self._limit_s: float | None = request.extensions.get("timeout", {}).get("read")
        self._began = time.monotonic()
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def check_encoding(self, response: httpx.Response) -> None:
        encoding = response.headers.get("content-encoding", IDENTITY)
        if encoding != IDENTITY:  # a small compressed response may decompress to any size
            raise httpx.RemoteProtocolError(
                f"the response is compressed ({encoding[:20]}), but compression was not requested"
            )

    def add(self, piece: bytes) -> bytes:
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_bytes:
            raise httpx.ReadError(f"the response has more than {self._max_bytes >> 20} MiB")
        if self._limit_s is not None and time.monotonic() - self._began > self._limit_s:
            raise httpx.ReadTimeout(f"no complete response within {self._limit_s:g} s")
        return piece


class _Stream(httpx.SyncByteStream):
    def __init__(self, response: httpx.Response, limits: _Limits) -> None:
        self._response = response
        self._inner: Any = response.stream
        self._limits = limits

    def __iter__(self) -> Iterator[bytes]:
        self._limits.check_encoding(self._response)
        for piece in self._inner:
            yield self._limits.add(piece)

    def close(self) -> None:
        self._inner.close()


class _AsyncStream(httpx.AsyncByteStream):
    def __init__(self, response: httpx.Response, limits: _Limits) -> None:
        self._response = response
        self._inner: Any = response.stream
        self._limits = limits

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._limits.check_encoding(self._response)
        pieces = aiter(self._inner)
        async with aclosing(pieces):
            async for piece in pieces:
                yield self._limits.add(piece)

    async def aclose(self) -> None:
        await self._inner.aclose()
