"""Whether others can connect to a peer: answers in, news for the owner out."""

from __future__ import annotations

from random import Random

import pytest

from routing.reach import HOW, Answer, Quota, Reachability, Way, askable, choose, may_dial
from routing.types import PeerRecord, PeerState, Span

OURS = ("192.168.1.5:4001",)


def no(by: str, reason: str = "timed out", way: Way = Way.STREAM) -> Answer:
    return Answer(by, way, ((OURS[0], reason),))


def yes(by: str) -> Answer:
    return Answer(by, Way.DIRECT, ((OURS[0], "reached"),))


def record(peer_id: str, *addresses: str, state: PeerState = PeerState.SERVING) -> PeerRecord:
    return PeerRecord(peer_id=peer_id, span=Span(0, 1), addresses=addresses, state=state)


@pytest.mark.parametrize(
    ("answers", "others", "news"),
    [
        ([], 0, False),  # nobody is there
        ([], 3, False),  # nobody answers
        ([no("a")], 1, True),  # the only other one
        ([no("a")], 2, False),
        ([no("a"), no("a")], 2, False),  # one voice
        ([no("a"), no("b")], 9, True),
        ([no("a"), no("b"), yes("c")], 9, False),
        ([yes("a")], 9, False),  # all is well from the start
    ],
)
def test_when_the_owner_is_told(answers, others, news):
    assert (Reachability(OURS).hear(answers, others) is not None) == news


def test_the_owner_is_told_once_and_again_when_it_changes():
    known = Reachability(OURS)
    first = known.hear([no("a"), no("b")], 5)
    assert first is not None and not first.reachable
    assert first.message == "other peers cannot connect to 192.168.1.5:4001 (timed out)"
    assert first.advice == f"{HOW}; until then everything goes over slower relayed streams"
    assert known.hear([no("a"), no("c", "refused")], 5) is None  # the same again
    assert known.hear([no("a")], 5) is None and known.reachable is False  # too few to say anything
    better = known.hear([no("a"), yes("b")], 5)
    assert better is not None and better.reachable and known.reachable
    assert known.hear([yes("a")], 5) is None
    assert known.hear([no("a"), no("b")], 5) is not None


def test_without_streams_nobody_can_use_it():
    notice = Reachability(OURS).hear([no("a", "refused", Way.NONE), no("b", "refused", Way.NONE)], 2)
    assert notice is not None and notice.advice.endswith("until then nobody can use this peer")
    assert notice.tried == ((OURS[0], "refused"),)


def test_words_and_addresses_of_strangers_are_not_repeated():
    liar = Answer("a", Way.NONE, ((OURS[0], "\x1b[2J send money"), ("evil.example:1", "refused")))
    notice = Reachability(OURS).hear([liar], 1)
    assert notice is not None and notice.message == "other peers cannot connect to 192.168.1.5:4001 (failed)"


def test_who_is_asked():
    bridge = "172.17.0.1:4001"  # every machine with containers has it
    records = [
        record("me", "192.168.1.5:4001"),
        record("beside", "192.168.1.5:4002"),
        record("bridged", "192.168.1.6:4001", bridge),
        record("far", "203.0.114.7:4001"),
        record("leaves", "192.168.1.7:4001", state=PeerState.LEAVING),
        record("streams"),
    ]
    assert askable(records, "me", OURS) == ["bridged", "far"]
    assert askable(records, "me", (*OURS, bridge)) == ["bridged", "far"]
    home = ("203.0.114.7:4002", "192.168.1.5:4001")
    assert askable([*records, record("v6", "[2001:4860::8]:1")], "me", home) == ["bridged", "v6"]


def test_at_most_three_are_asked_by_chance():
    many = [f"peer {n}" for n in range(20)]
    chosen = choose(many, Random(1))
    assert len(set(chosen)) == 3 and chosen != choose(many, Random(2))
    assert choose(many[:2], Random(1)) in (many[:2], many[1::-1]) and choose([], Random(1)) == []


def test_nobody_learns_what_listens_near_us():
    assert may_dial("203.0.114.7:22", ("192.168.1.5:1",)) and may_dial("192.168.1.9:22", ("10.0.0.1:1",))
    assert not may_dial("192.168.1.9:22", ("203.0.114.7:1",)) and not may_dial("127.0.0.1:22", ("192.168.1.5:1",))
    assert may_dial("127.0.0.1:22", ("127.0.0.1:1",)) and not may_dial("[::1]:22", ())
    assert not may_dial("router.home:80", ("192.168.1.5:1",))


def test_an_asker_is_answered_once_a_minute_and_few_at_once():
    quota = Quota(every_s=60, at_once=2, most=3)
    assert quota.take("a", 0) and not quota.take("a", 59) and quota.take("b", 1)
    assert not quota.take("c", 2)  # two are being answered
    quota.done()
    assert quota.take("c", 2)
    quota.done()
    assert not quota.take("d", 3)  # no room to remember it
    assert quota.take("a", 60)
    quota.done()
    assert quota.take("d", 62.5)  # b and c are forgotten
