"""The session rule under random faults, and the proof that each part of it is needed."""

from __future__ import annotations

import functools

import pytest

from peer import following, prefixes, pulling, seats
from peer.ahead import Ahead
from peer.seats import Seat
from peer.session import PeerSession
from peer.sessions import SessionTable
from routing.types import Route
from swarm.driver import NO_LIMIT, Driver
from swarm.frames import Frame
from tests.session.virtual import VirtualClient, VirtualNet, simulate

pytestmark = pytest.mark.beside

VARIANTS = [
    {"speculate": speculate, "timers": timers, "liar": liar}
    for speculate in (False, True)
    for timers in (False, True)
    for liar in (False, True)
]


@functools.cache
def clean_text(seed: int, **shape: bool) -> tuple[int, ...]:
    clean = simulate(seed, **shape)
    assert clean.finished and clean.reroutes == 1, f"seed {seed}: the clean run did not end"
    return tuple(clean.tokens)


def outcome(seed: int, variant: dict) -> str | None:
    """None if the disturbed run ended with the clean text and left nothing; else what went wrong."""
    truth = list(clean_text(seed, **clean_shape(variant)))
    try:
        hurt = simulate(seed, disturb=True, truth=truth, **variant)
    except AssertionError as error:
        return str(error)
    return verdict(hurt, truth)


def clean_shape(variant: dict) -> dict[str, bool]:
    """What changes the text itself: the codecs, and whether the chains have the same boundaries."""
    if variant.get("lossy"):
        return {"lossy": True}
    return {"lossy_before": True} if variant.get("lossy_before") else {}


def verdict(hurt: VirtualClient, truth: list[int]) -> str | None:
    if not hurt.finished:
        return f"hung after {hurt.reroutes} routes at {len(hurt.tokens)} tokens"
    if hurt.tokens != truth:
        return "wrong text"
    if hurt.left_over:
        return f"sessions left over on {hurt.left_over}"
    return None


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(k for k, on in v.items() if on) or "plain")
def test_disturbed_runs_end_with_the_clean_text(variant: dict) -> None:
    for seed in range(140):
        shape = {**variant, "windows": seed % 3 == 0}
        assert outcome(seed, shape) is None, f"seed {seed}, {shape}"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(k for k, on in v.items() if on) or "plain")
def test_what_an_earlier_session_left_changes_no_text(variant: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if liars had a hand in it, or if the client is wrong about what is still there."""
    monkeypatch.setattr(prefixes, "LEAST", 3)
    for seed in range(60):
        shape = {**variant, "earlier": True, "windows": seed % 2 == 1}
        assert outcome(seed, shape) is None, f"seed {seed}, {shape}"


def few_positions(patch: pytest.MonkeyPatch) -> None:
    """The texts here are short."""
    patch.setattr(following, "LEAST", 4)
    for module in (seats, following):
        patch.setattr(module, "WORTH_SWITCHING", 4)
    patch.setattr(pulling, "FIRST", 3)
    patch.setattr(pulling, "PIECE_BYTES", 200)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(k for k, on in v.items() if on) or "plain")
def test_standbys_change_no_text(variant: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are killed, evicted and called into the route as all others, in the midst of what they are sent."""
    few_positions(monkeypatch)
    for seed in range(50):
        shape = {**variant, "standby": True, "windows": seed % 3 == 0, "earlier": seed % 4 == 1}
        assert outcome(seed, shape) is None, f"seed {seed}, {shape}"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(k for k, on in v.items() if on) or "plain")
def test_ways_that_lose_change_no_text_by_a_loss(variant: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent again is what was sent before: the text is that of the same codecs without faults."""
    few_positions(monkeypatch)
    differ = 0
    for seed in range(60):
        shape = {**variant, "lossy": True, "standby": seed % 2 == 0, "windows": seed % 3 == 0}
        assert outcome(seed, shape) is None, f"seed {seed}, {shape}"
        differ += clean_text(seed, lossy=True) != clean_text(seed, lossy_before=True)
    assert differ > 40  # something was lost at all


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(k for k, on in v.items() if on) or "plain")
def test_an_exact_session_takes_nothing_that_an_earlier_one_lost(
    variant: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the names are the same here: what a seat holds is of a numeric class."""
    monkeypatch.setattr(prefixes, "LEAST", 3)
    for seed in range(40):
        shape = {**variant, "earlier": True, "lossy_before": True, "windows": seed % 2 == 1}
        assert outcome(seed, shape) is None, f"seed {seed}, {shape}"


def test_what_an_earlier_session_left_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(least: int) -> int:
        monkeypatch.setattr(prefixes, "LEAST", least)
        return sum(simulate(seed, earlier=True).computed for seed in range(40))

    # Of 35 positions of the second session 12, its prompt, may be there; at seven of ten hops at most.
    assert cost(3) < 0.93 * cost(1000)


def test_a_failure_costs_little_computation() -> None:
    """Seats that stay compute nothing twice: a disturbed run costs a small multiple of a clean one."""
    ratios = []
    for seed in range(40):
        clean = simulate(seed)
        hurt = simulate(seed, disturb=True, truth=clean.tokens, timers=False)
        ratios.append(hurt.computed / clean.computed)
    assert sum(ratios) / len(ratios) < 3.5


# -- each part of the rule, taken out ------------------------------------------------------------------------


def forget_names_at_open_and_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Seat, "continues", lambda self, frame: True)
    patch.setattr(Seat, "_kept", lambda self, names, keep_to: min(self.position, keep_to, len(names) // 8 - 1))


def answer_without_comparing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Seat, "same", lambda self, frame: min(frame.end, self.position) - frame.start)


def forget_keep_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Driver, "_keep", lambda self, hop: NO_LIMIT)


def adopt_whatever_was_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefixes, "LEAST", 3)
    patch.setattr(Driver, "_adopts", property(lambda self: True, lambda self, value: None), raising=False)


def one_seat_a_peer(patch: pytest.MonkeyPatch) -> None:
    real = PeerSession.open

    def open(self: PeerSession, frame: Frame, link: object) -> None:
        for (entry, exit), seat in list(self.seats.items()):
            for hop in frame.body.route:
                if hop.peer_id == self.table.me and (hop.entry, hop.exit) not in self.seats and seat.working is None:
                    del self.seats[entry, exit]  # K and V of other boundaries taken for those wanted
                    seat.entry, seat.exit = hop.entry, hop.exit
                    seat.store.inputs = (seat.store.inputs * 6)[: hop.exit - hop.entry]  # type: ignore[attr-defined]
                    seat.store.inputs = [list(i) for i in seat.store.inputs]  # type: ignore[attr-defined]
                    self.seats[hop.entry, hop.exit] = seat
                    break
        real(self, frame, link)

    patch.setattr(PeerSession, "open", open)


def no_repeated_ask_after_eviction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Seat, "ask_again", lambda self: None)


def asks_survive_truncation(patch: pytest.MonkeyPatch) -> None:
    real = Seat.truncate

    def truncate(self: Seat, position: int) -> None:
        asked = self.asked_to
        real(self, position)
        self.asked_to = asked

    patch.setattr(Seat, "truncate", truncate)


def drop_early_frames(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SessionTable, "hold", lambda self, frame, sender: None)


def silent_renewal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VirtualNet, "_learn", lambda self, end, reason: self._unaware.discard(end))


def keep_inputs_without_comparing(patch: pytest.MonkeyPatch) -> None:
    real = Ahead.keep

    def keep(self: Ahead, position: int, name: bytes, names: bytes, keep_to: int, epoch: int) -> None:
        before = list(self._frames)
        real(self, position, name, names, keep_to, epoch)
        if before and before[0].start == position:
            self._frames = before
            for frame in before:
                frame.epoch = epoch

    patch.setattr(Ahead, "keep", keep)


def trust_what_was_pulled(patch: pytest.MonkeyPatch) -> None:
    real = Driver.distrust

    def distrust(self: Driver, peer_id: str, keep_to: int = 0) -> None:
        self._sources.clear()
        real(self, peer_id, keep_to)

    patch.setattr(Driver, "distrust", distrust)


def choose_codecs_anew(patch: pytest.MonkeyPatch) -> None:
    real = Driver._choose_codecs

    def choose(self: Driver, route: Route) -> None:
        self.codecs = {}
        real(self, route)

    patch.setattr(Driver, "_choose_codecs", choose)


def adopt_whatever_was_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefixes, "LEAST", 3)
    patch.setattr(PeerSession, "numeric_class", property(lambda self: 0, lambda self, value: None), raising=False)


WHERE_LOST = {choose_codecs_anew: {"lossy": True}, adopt_whatever_was_lost: {"earlier": True, "lossy_before": True}}
OF_STANDBYS = (keep_inputs_without_comparing, trust_what_was_pulled)


@pytest.mark.parametrize(
    "take_out",
    [
        forget_names_at_open_and_step,
        answer_without_comparing,
        forget_keep_to,
        adopt_whatever_was_left,
        one_seat_a_peer,
        no_repeated_ask_after_eviction,
        asks_survive_truncation,
        drop_early_frames,
        silent_renewal,
        *OF_STANDBYS,
        *WHERE_LOST,
    ],
)
def test_each_part_of_the_rule_is_needed(take_out, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any part removed, some seed hangs or ends with another text."""
    # One is missed only where a liar was left at a place that the next session comes to, first with seed 307. Two
    # only where a standby was called after it had been sent other words, or lies: 181 and 191.
    seeds = range(300, 420) if take_out is adopt_whatever_was_left else range(200)
    if take_out in OF_STANDBYS:
        seeds = range(180, 300)
    shape = WHERE_LOST.get(take_out, {})
    for seed in seeds:  # fill the cache of clean texts before the rule is broken
        clean_text(seed, **clean_shape(shape))
    take_out(monkeypatch)
    standby = take_out in OF_STANDBYS
    if standby:
        few_positions(monkeypatch)
    for seed in seeds:
        for variant in (v for v in VARIANTS if not v["timers"]):
            truth = list(clean_text(seed, **clean_shape(shape)))
            try:
                more = {"earlier": True} if take_out is adopt_whatever_was_left else shape
                hurt = simulate(seed, disturb=True, truth=truth, standby=standby, **more, **variant)
            except (AssertionError, IndexError):
                return
            if verdict(hurt, truth) is not None:
                return
    pytest.fail("this part of the rule was not missed in hundreds of runs")


