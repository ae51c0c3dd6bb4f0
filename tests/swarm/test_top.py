"""`swarm top` over looks that are made up: what changed, what is shown, what is told when a look fails."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console as RichConsole
from rich.console import RenderableType

from routing.condition import Condition, Judgement
from routing.errors import TimedOut
from routing.types import PeerRecord, PeerState, Span
from swarm.about import About
from swarm.commands.top import watch
from swarm.joincode import JoinCode
from swarm.render import reasons
from swarm.status import EXPIRED_SHOWN_S, Lookout, PeerSeen, Snapshot
from swarm.terminal import Console
from swarm.top_table import What, changes, top_view

A, B, C = "12D3KooWAbcdefXy3Qz1", "12D3KooWAbcdefPq77Lm", "12D3KooWAbcdefRr5Tt9"
PEER = "12D3KooWBYQ2jPVZbqGWGgZqeXrbPJkuCgRJ4qiVk4smg2ELpNjo"
ABOUT = About(model="tiny", family="llama", n_blocks=6, dtype="float32")
SERVING = Judgement(Condition.SERVING)


def peer(peer_id: str, blocks: str = "0:4", judgement: Judgement = SERVING, **changes) -> PeerSeen:
    record = PeerRecord(peer_id=peer_id, span=Span.parse(blocks), cache_free=12_345_678, cache_total=24_691_356)
    return PeerSeen(record=record, rtt_s=0.0123, sessions=3, judgement=judgement, **changes)


def snapshot(*peers: PeerSeen, coverage: tuple[int, ...] = (1,) * 6) -> Snapshot:
    return Snapshot(about=ABOUT, peers=peers, leaving=(), coverage=coverage)


def drawn(renderable: RenderableType, width: int = 80) -> str:
    out = io.StringIO()
    RichConsole(file=out, width=width, force_terminal=False).print(renderable)
    return out.getvalue()


class FakeLookout:
    def __init__(self, *looks: Snapshot | Exception):
        self.looks = list(looks)
        self.answer_s: list[float] = []

    async def look(self, answer_s: float) -> Snapshot:
        self.answer_s.append(answer_s)
        found = self.looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


async def watched(*looks: Snapshot | Exception, as_json: bool = False) -> tuple[int, list[str]]:
    shown: list[str] = []
    console = Console(as_json=as_json)
    code = await watch(
        console, lambda view: shown.append(drawn(view)), FakeLookout(*looks), every_s=0.0, looks=len(looks)
    )
    return code, shown


def test_what_changed_between_two_looks():
    silent = Judgement(Condition.NO_ANSWER, "refused")
    before, after = snapshot(peer(A), peer(B), peer(C)), snapshot(peer(A, "2:6"), peer(B, judgement=silent))
    found = changes(before, after)
    assert {peer_id: change.text for peer_id, change in found.items()} == {A: "had 0:4", B: "was serving", C: "gone"}
    assert {peer_id: change.what for peer_id, change in changes(after, before).items()} == {
        A: What.BLOCKS, B: What.STATE, C: What.CAME,
    }  # fmt: skip
    assert changes(None, after) == {} and changes(after, after) == {}


def test_a_look_reads_well_at_eighty_columns():
    silent = Judgement(Condition.NO_ANSWER, "192.0.2.1:4001: refused")
    before = snapshot(peer(A), peer(B, "112:126"), peer(C))
    after = snapshot(replace(peer(A, judgement=silent), rtt_s=None, sessions=None), peer(B, "112:126"))
    text = drawn(top_view(after, changes(before, after), "12:00:00"))
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines() if line.strip()]
    assert " ".join(rows[0]) == "tiny (llama, 6 blocks), 1 of 2 peers serve 12:00:00"
    assert ["*", "Xy3Qz1", "0:4", "no", "answer", "-", "-", "0", "50%", "was", "serving"] in rows
    assert ["-", "Rr5Tt9", "0:4", "-", "-", "-", "-", "-", "gone"] in rows  # told once, in its place
    assert ["Pq77Lm", "112:126", "serving", "12.3", "3", "0", "50%"] in rows
    assert "Xy3Qz1: no answer, 192.0.2.1:4001: refused" in text and "only one peer serves" in text


def test_the_reason_of_a_stranger_cannot_steer_the_terminal():
    [line] = reasons({A: Judgement(Condition.NO_ANSWER, "\x1b[2Jgone")})
    assert line.plain == "Xy3Qz1: no answer, \ufffd[2Jgone"


async def test_a_directory_that_cannot_be_read_is_told_and_tried_again():
    code, shown = await watched(snapshot(peer(A)), TimedOut("read from the DHT: no answer"), snapshot(peer(A), peer(B)))
    assert code == 0 and len(shown) == 3
    assert shown[1] == "the directory cannot be read now, trying again: read from the DHT: no answer\n"
    assert "came" in shown[2]  # the look before counts, not the one that failed


async def test_only_if_no_look_succeeds_it_is_an_error():
    with pytest.raises(TimedOut):
        await watched(TimedOut("one"), TimedOut("two"))
    assert (await watched(snapshot(coverage=(1, 1, 1, 1, 0, 1)), TimedOut("two")))[0] == 4


async def test_json_has_an_object_a_look(capsys):
    await watched(snapshot(peer(A)), TimedOut("away"), snapshot(peer(A), peer(B)), as_json=True)
    first, failed, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["changed"] == [] and first["peers"][0]["sessions"] == 3
    assert failed == {"event": "look_failed", "error": "TimedOut", "message": "away"}
    assert second["changed"] == [{"peer": B, "what": "came", "before": None}]


async def test_later_looks_do_not_wait_as_long_for_who_is_silent():
    lookout = FakeLookout(snapshot(), snapshot(), snapshot())
    await watch(Console(), lambda _: None, lookout, every_s=0.0, looks=3)
    assert lookout.answer_s[0] > lookout.answer_s[1] == lookout.answer_s[2] > 0


def test_who_vanishes_without_a_goodbye_is_told_for_a_while():
    lookout = Lookout(JoinCode(bootstrap=(f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}",), fingerprint=bytes(32)))
    known = PeerRecord(peer_id=A, span=Span(0, 4), expires_at=100.0)
    assert lookout._present([known], 50.0) == [known]
    assert lookout._present([], 60.0) == [known]  # one read missed it
    assert lookout._present([], 100.0 + EXPIRED_SHOWN_S) == [known]
    assert lookout._present([], 100.1 + EXPIRED_SHOWN_S) == []
    lookout._present([known], 50.0)
    assert lookout._present([replace(known, state=PeerState.LEAVING)], 60.0) == []
