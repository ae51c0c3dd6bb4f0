"""Patience, and one move at a time in a region."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from routing.placement import best_span, moved, throughput
from routing.rebalancing import (
    PATIENT,
    Lease,
    Rebalancer,
    goes_first,
    is_waited_for,
    may_choose,
    may_leave,
    overlap,
    rescue_comes,
    with_leases,
)
from routing.types import PeerRecord, PeerState, Span
from routing.view import RecordsSeen, View, apply
from tests.routing.test_placement import fastest_s, view_of

JOINING, SERVING, DRAINING, LEAVING = PeerState
CROWDED = view_of(4, *((peer, "0:2", SERVING) for peer in ("a", "b", "c", "d")), ("z", "2:4", SERVING))
BARE = view_of(4, *((peer, "0:2", SERVING) for peer in ("a", "b", "c")), ("z", "2:4", DRAINING))


def lease(peer: str, span: str, since: float = 0.0, lasts: float = 60.0) -> Lease:
    return Lease(peer_id=peer, span=Span.parse(span), since=since, expires_at=since + lasts)


def test_a_gain_must_be_seen_twice():
    peer = Rebalancer("a")
    assert peer.look(CROWDED, [], 2, 0.0) is None
    assert peer.look(CROWDED, [], 2, 30.0).span == Span(2, 4)


HALVES = view_of(4, ("fast", "0:2", SERVING), ("a", "0:2", SERVING), ("z", "2:4", SERVING), slow={
    "fast": 0.01, "a": 0.02, "z": 0.02,
})  # fmt: skip


def waiting(view: View, peer: str, queue_s: float) -> View:
    return View({**view.records, peer: replace(view.records[peer], queue_s=queue_s)}, view.n_blocks)


BUSY = waiting(HALVES, "z", 0.05)  # longer than a pass


def test_a_move_that_makes_tokens_slower_leaves_others_time_to_make_one_that_does_not():
    """Between the halves the fast one doubles the throughput, and so does the other one in the weaker half."""
    fast, other = Rebalancer("fast"), Rebalancer("a")
    assert [fast.look(BUSY, [], 2, 0.0), other.look(BUSY, [], 2, 0.0), fast.look(BUSY, [], 2, 0.0)] == [None] * 3
    move = other.look(BUSY, [], 2, 0.0)
    assert move.span == Span(2, 4) and not move.slows and move.tokens_per_s == pytest.approx(50)
    after = moved(BUSY, {"a": move.span})
    assert all(fast.look(after, [], 2, 0.0) is None for _ in range(PATIENT))


def test_if_nobody_makes_it_the_throughput_comes_first():
    fast = Rebalancer("fast")
    *before, move = [fast.look(BUSY, [], 2, 0.0) for _ in range(PATIENT)]
    assert before == [None] * (PATIENT - 1)
    assert move.span == Span(1, 3) and move.slows and move.tokens_per_s == pytest.approx(50)
    assert fastest_s(moved(BUSY, {"fast": move.span})) > fastest_s(BUSY)


@pytest.mark.parametrize("peer", ["a", "fast"])
def test_where_nobody_waits_no_tokens_are_made_slower_for_more_of_them(peer):
    """Neither where a step waits for less than a pass, nor where it waits for blocks that stay as weak."""
    look = Rebalancer("fast").look
    assert all(look(HALVES, [], 2, 0.0) is None for _ in range(2 * PATIENT))
    waits = waiting(HALVES, peer, 0.039 if peer == "a" else 0.019)
    assert all(look(waits, [], 2, 0.0) is None for _ in range(2 * PATIENT))
    assert is_waited_for(waiting(HALVES, peer, 0.05), Span(1, 3), 0.0)
    assert not is_waited_for(waiting(HALVES, peer, 0.05), Span(2, 4), 0.0)


def test_a_gain_that_went_away_begins_anew():
    peer, well = Rebalancer("a"), view_of(4, ("a", "0:2", SERVING), ("z", "2:4", SERVING))
    assert [peer.look(view, [], 2, 0.0) for view in (CROWDED, well, CROWDED)] == [None, None, None]
    assert peer.look(CROWDED, [], 2, 0.0) is not None


@pytest.mark.parametrize("state", [DRAINING, LEAVING])
def test_a_rescue_waits_for_no_second_look(state):
    view = view_of(4, *((peer, "0:2", SERVING) for peer in ("a", "b")), ("z", "2:4", state))
    move = Rebalancer("a").look(view, [], 2, 0.0)
    assert move.rescues and move.span == Span(2, 4)


def test_who_sees_anothers_lease_for_the_gap_stays():
    assert Rebalancer("a").look(BARE, [lease("b", "2:4")], 2, 1.0) is None


def test_a_lease_whose_holder_died_is_over_when_it_expires():
    dead = lease("b", "2:4", lasts=60.0)
    assert Rebalancer("a").look(BARE, [dead], 2, 59.0) is None
    assert Rebalancer("a").look(BARE, [dead], 2, 61.0).span == Span(2, 4)


def test_one_at_a_time_also_from_the_same_place():
    view = view_of(6, *((p, "0:2", SERVING) for p in "abcd"), ("y", "2:4", DRAINING), ("z", "4:6", DRAINING))
    assert Rebalancer("a").look(view, [lease("b", "2:4")], 2, 1.0) is None
    assert overlap(view, lease("a", "4:6"), lease("b", "2:4"))  # both leave 0:2
    assert not overlap(view, lease("a", "2:4"), lease("x", "4:6"))  # nobody knows what x serves


@pytest.mark.parametrize(("mine", "other", "first"), [(5.0, 6.0, True), (6.0, 5.0, False), (5.0, 5.0, True)])
def test_of_two_that_race_the_older_goes_first_then_the_lower_id(mine, other, first):
    a, b = lease("a", "2:4", mine), lease("b", "2:4", other)
    assert goes_first(BARE, a, [a, b], 7.0) is first
    assert goes_first(BARE, b, [a, b], 7.0) is not first


def test_a_lease_that_lies_far_ahead_counts_for_nothing():
    assert goes_first(BARE, lease("b", "2:4", 5.0), [lease("a", "2:4", 99.0)], 6.0)


def test_before_old_blocks_are_given_up_they_must_have_somebody_else():
    mine = lease("a", "2:4")
    assert may_leave(BARE, mine, [mine], 1.0)
    alone = view_of(4, ("a", "0:2", SERVING), ("z", "2:4", DRAINING))
    assert not may_leave(alone, mine, [mine], 1.0)
    assert not may_leave(BARE, mine, [mine, lease("b", "2:4"), lease("c", "2:4")], 1.0)  # they go too


@pytest.mark.parametrize(("mine", "other", "next_one"), [(5.0, 6.0, True), (6.0, 5.0, False), (5.0, 5.0, True)])
def test_newcomers_choose_one_at_a_time_the_oldest_first_then_the_lower_id(mine, other, next_one):
    a, b = lease("a", "0:4", mine), lease("b", "0:4", other)
    assert may_choose(a, [a, b], 4, 7.0) is next_one
    assert may_choose(b, [a, b], 4, 7.0) is not next_one


def test_a_newcomer_waits_neither_for_who_has_chosen_nor_for_who_is_dead():
    mine = lease("b", "0:4", 5.0)
    assert may_choose(mine, [lease("a", "0:2", 4.0), mine], 4, 7.0)
    assert may_choose(mine, [lease("a", "0:4", 4.0, lasts=2.0), mine], 4, 7.0)


def test_a_newcomer_that_has_chosen_is_joining_and_one_that_still_chooses_is_not_there():
    after = with_leases(BARE, [lease("x", "2:4"), lease("y", "0:4")])
    assert after.records["x"].state is JOINING and after.records["x"].span == Span(2, 4) and "y" not in after.records
    assert Rebalancer("a").look(BARE, [lease("x", "2:4")], 2, 1.0) is None  # nothing is left to rescue


def test_who_drains_is_not_taken_for_a_newcomer():
    assert with_leases(BARE, [lease("z", "0:2", 5.0)]).records["z"].state is DRAINING


LAST = (("a", "0:2", SERVING), ("b", "1:3", SERVING), ("z", "2:4", DRAINING))  # of block 3


@pytest.mark.parametrize(
    ("more", "leases", "comes"),
    [
        ((), [], False),
        ((("x", "3:4", JOINING),), [], True),
        ((("x", "0:3", JOINING),), [], False),  # b has block 2 already
        ((("x", "3:4", SERVING),), [lease("y", "3:4")], False),  # nobody is needed
        ((("x", "3:4", LEAVING),), [], False),
        ((), [lease("a", "2:4")], True),
        ((), [lease("a", "0:3")], False),
        ((), [lease("a", "2:4", lasts=0.5)], False),  # it died
        ((), [lease("x", "0:4")], True),  # a newcomer that chooses
        ((), [lease("z", "2:4")], False),  # its own
    ],
)
def test_a_peer_that_leaves_knows_whether_somebody_comes_for_what_it_alone_serves(more, leases, comes):
    assert rescue_comes(view_of(4, *LAST, *more), "z", leases, 1.0) is comes


def test_it_waits_for_one_that_still_loads_them():
    coming = PeerRecord(peer_id="a", span=Span(1, 2), loads=Span(1, 4), expires_at=100.0)
    assert rescue_comes(apply(view_of(4, *LAST), RecordsSeen([coming])), "z", [], 1.0)


def test_who_is_not_in_the_directory_waits_for_nobody():
    assert not rescue_comes(view_of(4, *LAST[:2]), "z", [lease("a", "2:4")], 1.0)


def test_a_look_out_of_turn_is_for_rescues_alone_and_proves_nothing_else():
    peer = Rebalancer("a")
    assert [peer.look(CROWDED, [], 2, 0.0, rescue=True) for _ in range(3)] == [None] * 3
    assert peer.look(CROWDED, [], 2, 0.0) is None and peer.look(CROWDED, [], 2, 0.0, rescue=True) is None
    assert peer.look(CROWDED, [], 2, 30.0) is not None
    assert Rebalancer("a").look(BARE, [], 2, 0.0, rescue=True).span == Span(2, 4)


@pytest.mark.parametrize("state", [JOINING, DRAINING, LEAVING])
def test_nobody_leaves_blocks_to_a_peer_that_does_not_serve_them_yet_or_any_more(state):
    view = view_of(4, ("a", "0:2", SERVING), ("b", "0:2", state), ("z", "2:4", DRAINING))
    assert not may_leave(view, lease("a", "2:4"), [lease("a", "2:4")], 1.0)


def test_nobody_leaves_blocks_to_peers_that_are_about_to_move_themselves():
    mine, others = lease("a", "2:4"), [lease("b", "2:4"), lease("c", "2:4")]
    assert may_leave(BARE, mine, [mine, others[0]], 1.0)
    assert not may_leave(BARE, mine, [mine, *others], 1.0)
    assert may_leave(BARE, mine, [mine, others[0], lease("c", "2:4", lasts=0.5)], 1.0)


def test_who_drains_first_leaves_all_of_its_blocks_for_a_while():
    view = view_of(4, ("a", "0:2", SERVING), ("b", "0:1", SERVING), ("z", "2:4", DRAINING))
    mine = lease("a", "1:3")
    assert may_leave(view, mine, [mine], 1.0) and not may_leave(view, mine, [mine], 1.0, drains=True)


# -- six unlike peers, the busiest leaves, and one of five times the speed comes: as in `bench/moves.py` --------------

SPEEDS, FAST, BLOCK_S, BLOCKS, MOST = (1.0, 0.7, 1.2, 0.8, 0.6, 1.0), 5.0, 0.02, 6, 3
SEEDS = (*range(10), 17, 33, 35, 39, 42)  # in the latter and 6 it would go wrong without patience


class Six:
    """Peers that join one after the other, and look in turn, in an order of chance. `knows`: newcomers know how fast
    they are; in the lab they do not."""

    def __init__(self, rng: Random, knows: bool):
        self.rng, self.knows, self.view = rng, knows, View({}, BLOCKS)
        self.looking: dict[str, Rebalancer] = {}
        for number in rng.sample(range(len(SPEEDS)), len(SPEEDS)):
            self.join(f"p{number}", SPEEDS[number])

    def join(self, peer: str, speed: float) -> None:
        block_s = BLOCK_S / speed
        span = best_span(self.view, BLOCKS, MOST, 0.0, decode_s=block_s if self.knows else 0.0)
        record = PeerRecord(peer_id=peer, span=span, decode_s=block_s, expires_at=100.0)
        self.view = apply(self.view, RecordsSeen([record]))
        self.looking[peer] = Rebalancer(peer)

    def lose(self, peer: str) -> None:
        self.view = View({other: each for other, each in self.view.records.items() if other != peer}, BLOCKS)

    def look(self, rounds: int) -> None:
        for _ in range(rounds):
            for peer in self.rng.sample(sorted(self.view.records), len(self.view.records)):
                if move := self.looking[peer].look(self.view, [], MOST, 0.0):
                    self.view = moved(self.view, {peer: move.span})


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_where_a_fast_peer_came_the_swarm_gives_more_and_no_token_takes_longer(seed: int, knows: bool) -> None:
    six = Six(Random(seed), knows)
    six.look(PATIENT)
    six.lose(six.rng.choice(sorted(six.view.records)))
    six.look(six.rng.randrange(3))  # the gap may have been filled by then, or not
    six.join("fast", FAST)
    token_s, tokens_per_s = fastest_s(six.view), throughput(six.view, 0.0)
    six.look(3 * PATIENT)
    assert fastest_s(six.view) <= token_s * (1 + 1e-9)
    assert throughput(six.view, 0.0) >= tokens_per_s * (1 - 1e-9)
    bound = sum(1 / record.decode_s for record in six.view.records.values()) / BLOCKS
    assert throughput(six.view, 0.0) > 0.6 * bound
