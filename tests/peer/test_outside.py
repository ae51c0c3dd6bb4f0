"""A peer that asks others whether it can be reached: whom it asks, and what its owner hears."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from peer import outside
from peer.__main__ import _tell
from peer.outside import Outside
from routing.errors import ProtocolError, Unreachable
from routing.reach import Answer, Notice, Way
from routing.types import PeerRecord, Span
from swarm.terminal import Console

OURS = ("192.168.1.5:4001",)


class FakeHive:
    peer_id = "me"


class FakeDirectory:
    def __init__(self, *peers: str):
        self.records = [
            PeerRecord(peer_id=peer, span=Span(0, 1), addresses=(f"192.168.1.{n}:4001",))
            for n, peer in enumerate(("me", *peers), 5)
        ]

    async def refresh(self) -> list[PeerRecord]:
        return self.records


async def heard(monkeypatch: pytest.MonkeyPatch, says: dict[str, Any]) -> tuple[list[str], list[Notice]]:
    """Who was asked, and what was told, in one round."""
    asked, told = list[str](), list[Notice]()

    async def ask(hive: object, peer_id: str) -> Answer | None:
        asked.append(peer_id)
        if isinstance(says[peer_id], Exception):
            raise says[peer_id]
        return None if says[peer_id] is None else Answer(peer_id, says[peer_id], ((OURS[0], "refused"),))

    monkeypatch.setattr(outside, "ask", ask)
    await Outside(FakeHive(), FakeDirectory(*says), OURS, told.append, Random(1)).look()  # type: ignore[arg-type]
    return asked, told


async def test_alone_it_asks_nobody_and_says_nothing(monkeypatch):
    assert await heard(monkeypatch, {}) == ([], [])


async def test_three_are_asked_and_two_that_agree_are_enough(monkeypatch):
    asked, told = await heard(monkeypatch, dict.fromkeys("abcdef", Way.STREAM))
    assert len(set(asked)) == 3 and [notice.reachable for notice in told] == [False]
    _, told = await heard(monkeypatch, {"a": Way.STREAM, "b": Way.NONE, "c": Unreachable("gone")})
    assert len(told) == 1


async def test_a_directory_that_cannot_be_read_does_not_end_the_peer(monkeypatch):
    class Ended(BaseException):
        pass

    async def pause(seconds: float) -> None:
        raise Ended

    async def fails() -> list[PeerRecord]:
        raise Unreachable("p2pd says no")

    directory = FakeDirectory("a")
    monkeypatch.setattr(directory, "refresh", fails)
    monkeypatch.setattr(outside.asyncio, "sleep", pause)
    with pytest.raises(Ended):  # it came to the pause before the next try
        await Outside(FakeHive(), directory, OURS, lambda _: None).run()  # type: ignore[arg-type]


async def test_who_does_not_answer_says_nothing(monkeypatch):
    _, told = await heard(monkeypatch, {"a": Way.STREAM, "b": None, "c": ProtocolError("nonsense")})
    assert told == []


def test_what_the_owner_reads(capsys):
    tried = (("192.0.2.1:4001", "timed out"),)
    notice = Notice(False, "other peers cannot connect to 192.0.2.1:4001 (timed out)", "open it", tried)
    _tell(notice, Console())
    out, err = capsys.readouterr()
    assert not out and err == "other peers cannot connect to 192.0.2.1:4001 (timed out): open it\n"
    _tell(notice, Console(as_json=True))
    _tell(Notice(True, "other peers can connect to this one now"), Console(as_json=True))
    bad, good = map(json.loads, capsys.readouterr().out.splitlines())
    assert (bad["event"], bad["advice"], good["event"]) == ("unreachable", "open it", "reachable")
    assert bad["addresses"] == [{"address": "192.0.2.1:4001", "reason": "timed out"}]
