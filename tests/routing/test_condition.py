"""How a peer fares: records and answers in, a word and a reason out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from routing.condition import LEAST_FREE, SLOW_TIMES, Condition, judge
from routing.types import PeerRecord, PeerState, Span

NOW = 1000.0


FIRST = Span(0, 4)


def record(peer_id: str, span: Span = FIRST, **changes) -> PeerRecord:
    plain = PeerRecord(peer_id=peer_id, span=span, expires_at=NOW + 60, decode_s=0.01, cache_free=999, cache_total=1000)
    return replace(plain, **changes)


def conditions(*records: PeerRecord, silent: dict[str, str] | None = None) -> dict[str, Condition]:
    judged = judge(records, silent or {}, NOW)
    for judgement in judged.values():
        assert bool(judgement.reason) == (judgement.condition is not Condition.SERVING)
    return {peer_id: judgement.condition for peer_id, judgement in judged.items()}


@pytest.mark.parametrize(
    ("changes", "condition"),
    [
        ({}, Condition.SERVING),
        ({"state": PeerState.JOINING}, Condition.JOINING),
        ({"state": PeerState.DRAINING}, Condition.DRAINING),
        ({"state": PeerState.LEAVING}, Condition.LEAVING),
        ({"expires_at": NOW - 1}, Condition.EXPIRED),
        ({"cache_free": LEAST_FREE - 1}, Condition.FULL),
        ({"cache_free": LEAST_FREE}, Condition.SERVING),
        ({"cache_free": 0, "cache_total": 0}, Condition.SERVING),  # not stated
        ({"state": PeerState.DRAINING, "cache_free": 0}, Condition.DRAINING),
    ],
)
def test_what_a_record_tells(changes, condition):
    assert conditions(record("a", **changes)) == {"a": condition}


def test_the_reason_of_the_dial_is_told():
    judged = judge([record("a"), record("b")], {"b": "192.0.2.1:4001: refused"}, NOW)
    assert judged["b"].condition is Condition.NO_ANSWER and judged["b"].reason == "192.0.2.1:4001: refused"
    assert judged["a"].condition is Condition.SERVING
    gone = record("b", state=PeerState.LEAVING)
    assert conditions(gone, silent={"b": "refused"}) == {"b": Condition.LEAVING}
    loads = record("b", state=PeerState.JOINING)
    assert conditions(loads, silent={"b": "no address is known"}) == {"b": Condition.JOINING}
    drains = record("b", state=PeerState.DRAINING)
    assert conditions(drains, silent={"b": "refused"}) == {"b": Condition.NO_ANSWER}


def test_slow_is_told_by_those_who_serve_the_same_blocks():
    slow = record("slow", decode_s=0.01 * SLOW_TIMES * 1.01)
    assert conditions(slow, record("b"), record("c"))["slow"] is Condition.SLOW
    assert conditions(slow, record("b"))["slow"] is Condition.SLOW  # its own claim does not soften the median
    assert conditions(replace(slow, decode_s=0.01 * SLOW_TIMES * 0.99), record("b"))["slow"] is Condition.SERVING
    assert conditions(slow, record("b", Span(4, 8)))["slow"] is Condition.SERVING  # nobody to compare with
    assert conditions(slow, record("b", Span(3, 8)))["slow"] is Condition.SLOW
    assert conditions(slow, record("b"), silent={"b": "refused"})["slow"] is Condition.SERVING
    assert conditions(slow, record("b", decode_s=0.0))["slow"] is Condition.SERVING  # not stated
    assert conditions(slow, record("b"), record("c", decode_s=9), record("d", decode_s=9))["slow"] is Condition.SERVING
