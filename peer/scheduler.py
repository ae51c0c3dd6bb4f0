"""Owns the choice of what runs next. Pure: no torch, no clock, no I/O.

Three lanes. Decode steps, all that are ready, make a pass of their own; chunks of prefill make another, which is left
after any block when decode steps come (`Turns`), so that a prompt of any length delays the tokens of others by little
and loses nothing by being cut small. In each of these clients take turns, however many sessions each has. What only
keeps a standby warm runs while both are empty.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from peer.seats import Seat, Work
from peer.session import PeerSession
from routing.types import PeerId

MOST_REMEMBERED = 1024  # clients and sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    decode_most: int = 8  # positions: a work up to this is a decode step (a token, or a few that are guessed)
    prefill_most: int = 512  # positions of prefill in a pass


class Scheduler:
    """Works wait here, at most one a seat."""

    def __init__(self, config: SchedulerConfig = SchedulerConfig()):
        self.config = config
        self._decode = _Lane()
        self._prefill = _Lane()
        self._background: deque[Work] = deque()
        self._account = _Account()

    def __len__(self) -> int:
        """Works that wait."""
        return len(self._decode) + len(self._prefill) + len(self._background)

    @property
    def decode_waits(self) -> bool:
        """May be asked from another thread."""
        return bool(self._decode)

    @property
    def prefill_waits(self) -> bool:
        """May be asked from another thread."""
        return bool(self._prefill)

    def add(self, work: Work) -> None:
        if work.background:
            self._background.append(work)
        elif _positions(work) <= self.config.decode_most:
            self._decode.add(work)
        else:
            self._account.arrives(_client(work), idle=_client(work) not in self._prefill.clients)
            self._prefill.add(work)

    def hurry(self) -> None:
        """What was in the background, and is wanted now, waits with the others."""
        for work in [work for work in self._background if not work.background]:
            self._background.remove(work)
            self.add(work)

    def next_background(self) -> list[Work]:
        """Takes the works of the next pass that nobody waits for. Empty if there is none."""
        chosen: list[Work] = []
        while self._background and sum(map(_positions, chosen)) < self.config.prefill_most:
            chosen.append(self._background.popleft())
        return chosen

    def next_decode(self, most: int | None = None) -> list[Work]:
        """Takes the decode steps of the next pass, `most` at most: a step of each client, then a second one, and so on;
        clients and seats that wait longest first. Empty if none waits.
        """
        chosen: list[Work] = []
        while self._decode and (most is None or len(chosen) < most):
            for client in tuple(self._decode.clients):
                if most is None or len(chosen) < most:
                    chosen.append(self._decode.take_longest_waiting(client))
        return chosen

    def next_prefill(self) -> list[Work]:
        """Takes the chunks of the next pass. Empty if none waits.

        The client that had the least computed is served first, and of its sessions the one served longest ago. A
        work is never split, so the first runs even if it alone is over the budget: none waits for ever.
        """
        chosen: list[Work] = []
        budget = self.config.prefill_most
        skipped: set[PeerId] = set()
        while clients := [client for client in self._prefill.clients if client not in skipped]:
            client = self._account.least(clients)
            work = self._prefill.longest_unserved(client)
            if chosen and _positions(work) > budget:
                skipped.add(client)
                continue
            self._prefill.take(work)
            chosen.append(work)
            budget -= _positions(work)
            self._account.charge(client, _positions(work) * (work.seat.exit - work.seat.entry))
        return chosen


class _Lane:
    """Works by client and seat, each in order of arrival."""

    def __init__(self) -> None:
        self.clients: OrderedDict[PeerId, OrderedDict[Seat, Work]] = OrderedDict()
        self._served: OrderedDict[PeerSession, int] = OrderedDict()  # turn of a session's last work
        self._turns = 0

    def __len__(self) -> int:
        return sum(len(works) for works in self.clients.values())

    def __bool__(self) -> bool:
        return bool(self.clients)

    def add(self, work: Work) -> None:
        works = self.clients.setdefault(_client(work), OrderedDict())
        assert work.seat not in works, "a seat computes one work at a time"
        works[work.seat] = work

    def take_longest_waiting(self, client: PeerId) -> Work:
        work = next(iter(self.clients[client].values()))
        self.take(work)
        return work

    def longest_unserved(self, client: PeerId) -> Work:
        # A session has no work here while its next chunk is on its way, so what it got outlives its queue.
        return min(self.clients[client].values(), key=lambda work: self._served.get(work.seat.session, 0))

    def take(self, work: Work) -> None:
        works = self.clients[_client(work)]
        del works[work.seat]
        if works:
            self.clients.move_to_end(_client(work))
        else:
            del self.clients[_client(work)]
        self._turns += 1
        self._served[work.seat.session] = self._turns
        _forget_oldest(self._served, work.seat.session)


class _Account:
    """What was computed for each client. Who comes back from idling starts level with those who waited meanwhile: time
    spent idle earns nothing (start-time fair queueing, Goyal et al. 1996)."""

    def __init__(self) -> None:
        self._spent: OrderedDict[PeerId, int] = OrderedDict()
        self._level = 0

    def arrives(self, client: PeerId, idle: bool) -> None:
        if idle:
            self._spent[client] = max(self._spent.get(client, 0), self._level)
            _forget_oldest(self._spent, client)

    def least(self, clients: list[PeerId]) -> PeerId:
        """The first of those with the least; clients in order of waiting."""
        return min(clients, key=lambda client: self._spent.get(client, self._level))

    def charge(self, client: PeerId, amount: int) -> None:
        before = self._spent.get(client, self._level)
        self._level = max(self._level, before)
        self._spent[client] = before + amount


def _forget_oldest(remembered: OrderedDict, newest: object) -> None:  # type: ignore[type-arg]
    remembered.move_to_end(newest)
    if len(remembered) > MOST_REMEMBERED:
        remembered.popitem(last=False)


def _client(work: Work) -> PeerId:
    return work.seat.session.client_id


def _positions(work: Work) -> int:
    return work.end - work.start
