"""An HTTP proxy that loses answers: a request is done, and its sender never hears of it."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


class DroppingProxy:
    """Passes requests on to `target`, and loses the first answer of every route and a share of the others."""

    def __init__(self, target: str, *, share: float, seed: int = 0) -> None:
        self._host, self._port = urlsplit(target).hostname, urlsplit(target).port
        self._share = share
        self._random = random.Random(seed)
        self.answered: Counter[str] = Counter()
        """Answers by route, lost ones included."""
        self.lost: Counter[str] = Counter()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            kept = [line for line in lines[1:-2] if not line.lower().startswith("connection:")]
            request = "\r\n".join([lines[0], *kept, "Connection: close", "", ""]).encode("latin-1") + body
            from_server, to_server = await asyncio.open_connection(self._host, self._port)
            to_server.write(request)
            answer = await from_server.read()
            to_server.close()
            route = lines[0].split()[1].split("?")[0]
            self.answered[route] += 1
            if self.answered[route] == 1 or self._random.random() < self._share:
                self.lost[route] += 1
            else:
                writer.write(answer)
                await writer.drain()
        writer.close()


@contextmanager
def dropping(target: str, *, share: float) -> Iterator[tuple[str, DroppingProxy]]:
    """Run a proxy to `target` for the block; yield its address and itself."""
    proxy = DroppingProxy(target, share=share)
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(proxy.handle, "127.0.0.1", 0, limit=2**27))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", proxy
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.close()
