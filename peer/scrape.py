"""The little HTTP server that a peer's metrics are read from: one page, on the peer's own event loop.

On the loop, because what the page shows changes there: no locks, and nothing is left running when it is closed.
Takes GET and HEAD of /metrics, one question a connection. Knows nothing of what is on the page.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from routing.errors import PortInUse, StartError
from swarm.channel import format_address

PATH = "/metrics"
HEAD_BYTES = 8192  # of a request
ASK_S = 5.0  # for a request to come, and again for its answer to leave
MOST_OPEN = 16  # connections; more are closed at once


class MetricsServer:
    """`listen`, then `close`."""

    def __init__(self, page: Callable[[], bytes], content_type: str):
        """`page` is called on the event loop, once a request."""
        self._page, self._content_type = page, content_type
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[Any]] = set()

    async def listen(self, host: str, port: int = 0) -> str:
        """The URL of the page; port 0: the system chooses one. Raises PortInUse, StartError."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=HEAD_BYTES)
        except OSError as error:
            where = format_address(host, port)
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(
                    f"{where}, for metrics, is in use by another program",
                    advice="Choose another --metrics-port, or 0 to let the system choose.",
                ) from error
            raise StartError(
                f"cannot listen on {where} for metrics: {error}", advice="Choose another --metrics-host."
            ) from error
        return f"http://{format_address(*self._server.sockets[0].getsockname()[:2])}{PATH}"

    async def close(self) -> None:
        """No more connections, and none that is left."""
        if self._server is None:
            return
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            if len(self._serving) <= MOST_OPEN:
                # Who asks in other words than HTTP, too long, too slowly, or leaves, gets no answer.
                with suppress(OSError, EOFError, asyncio.LimitOverrunError, TimeoutError):
                    async with asyncio.timeout(ASK_S):
                        request = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(request))
                    async with asyncio.timeout(ASK_S):
                        await writer.drain()
        finally:
            self._serving.discard(task)
            writer.close()

    def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b"\r\n")[0].partition(b" ")
        target = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, b"Allow: GET, HEAD\r\n")
        if target != PATH.encode():
            return _response(HTTPStatus.NOT_FOUND)
        page = self._page()
        answer = _response(HTTPStatus.OK, f"Content-Type: {self._content_type}\r\n".encode(), page)
        return answer if method == b"GET" else answer[: len(answer) - len(page)]


def _response(status: HTTPStatus, headers: bytes = b"", body: bytes = b"") -> bytes:
    first = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return first.encode() + headers + b"\r\n" + body
