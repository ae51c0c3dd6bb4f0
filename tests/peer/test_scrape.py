"""The page for Prometheus over a real socket: what it answers, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from peer import scrape
from peer.config import PeerConfig
from peer.scrape import MetricsServer
from routing.errors import BadInput, PortInUse, StartError
from swarm.channel import parse_address

PAGE = b"swarm_peer_sessions 3.0\n"


@asynccontextmanager
async def serving(page: bytes = PAGE, host: str = "127.0.0.1") -> AsyncIterator[tuple[str, int]]:
    server = MetricsServer(lambda: page, "text/plain")
    url = await server.listen(host)
    assert url.startswith("http://") and url.endswith("/metrics")
    try:
        yield parse_address(url.removeprefix("http://").removesuffix("/metrics"))
    finally:
        await server.close()


async def asked(where: tuple[str, int], request: bytes) -> bytes:
    """All that comes back until the other side closes."""
    reader, writer = await asyncio.open_connection(*where)
    writer.write(request)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        (b"GET /metrics HTTP/1.1", b"200 OK", PAGE),
        (b"GET /metrics?name=x HTTP/1.0", b"200 OK", PAGE),
        (b"HEAD /metrics HTTP/1.1", b"200 OK", b""),
        (b"GET / HTTP/1.1", b"404 Not Found", b""),
        (b"POST /metrics HTTP/1.1", b"405 Method Not Allowed", b""),
        (b"nonsense", b"405 Method Not Allowed", b""),
    ],
)
async def test_what_it_answers(request_line: bytes, status: bytes, body: bytes) -> None:
    async with serving() as where:
        head, _, rest = (await asked(where, request_line + b"\r\nHost: x\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status + b"\r\n") and rest == body
    length = len(PAGE) if status == b"200 OK" else 0
    assert b"Content-Length: %d\r\n" % length in head + b"\r\n"


async def test_who_asks_for_too_much_or_nothing_gets_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "ASK_S", 0.05)
    async with serving() as where:
        assert await asked(where, b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (2 * scrape.HEAD_BYTES)) == b""
        assert await asked(where, b"") == b""
        assert PAGE in await asked(where, b"GET /metrics HTTP/1.1\r\n\r\n")


async def test_more_connections_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "MOST_OPEN", 1)
    async with serving() as where:
        _, first = await asyncio.open_connection(*where)
        assert await asked(where, b"") == b""  # at once: it is not waited for
        first.close()
        await first.wait_closed()


async def test_nothing_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "ASK_S", 600.0)
    before = asyncio.all_tasks()
    async with asyncio.timeout(10), serving() as where:
        reader, writer = await asyncio.open_connection(*where)
        writer.write(b"GET /met")
        await writer.drain()
        assert PAGE in await asked(where, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert await reader.read() == b"", "the connection was closed"
    writer.close()
    assert asyncio.all_tasks() == before
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*where)


async def test_a_port_that_is_taken_and_an_address_that_is_not_here() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)) as caught:
            await MetricsServer(lambda: PAGE, "text/plain").listen("127.0.0.1", port)
        assert "--metrics-port" in caught.value.advice
    with pytest.raises(StartError, match=r"192\.0\.2\.1"):  # reserved for documents (RFC 5737)
        await MetricsServer(lambda: PAGE, "text/plain").listen("192.0.2.1")
    never = MetricsServer(lambda: PAGE, "text/plain")
    await never.close()


@pytest.mark.parametrize("port", [-1, 65536])
def test_ports_that_are_none(port: int) -> None:
    with pytest.raises(BadInput, match="metrics_port"):
        PeerConfig(model="m", metrics_port=port)
