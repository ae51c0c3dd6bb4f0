"""Whether others can connect to a peer: whom to ask, whom to answer, and what the answers mean.

Owns the rules and the words for the owner. Does no I/O: how peers are asked is in `swarm/reach.py`. Time and chance are
arguments.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar

from routing.types import PeerId, PeerRecord, PeerState

T = TypeVar("T")

MOST_ASKED = 3
AGREEING = 2  # answers from different peers that it takes, where there are so many
ASK_EVERY_S = 60.0  # an asker is answered so often
ANSWERED_AT_ONCE = 4
_MOST_ASKERS = 1024  # remembered

REACHED, REFUSED, TIMED_OUT, NO_WAY = "reached", "refused", "timed out", "no way there"
WRONG_IDENTITY, FAILED = "wrong identity", "failed"
REASONS = (REACHED, REFUSED, TIMED_OUT, NO_WAY, WRONG_IDENTITY, FAILED)  # numbered on the wire
_TROUBLES = REASONS[1:]

HOW = (
    "open that port in the firewall or forward it on the router, or give the address that others see with "
    "--announce ADDRESS:PORT"
)


class Way(IntEnum):
    """How one peer came to another one, at best."""

    DIRECT = 0
    STREAM = 1
    NONE = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """What `by` found when it dialled us: each address with one of `REASONS`."""

    by: PeerId
    way: Way
    tried: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Notice:
    """For the owner of a peer. `tried`: each announced address with the reason."""

    reachable: bool
    message: str
    advice: str = ""
    tried: tuple[tuple[str, str], ...] = ()


class Choice(Protocol):
    def sample(self, population: Sequence[T], k: int) -> list[T]: ...


def askable(records: Sequence[PeerRecord], me: PeerId, addresses: Sequence[str]) -> list[PeerId]:
    """Those who can tell how we look from outside: not ourselves, not on our address, not about to leave."""
    return [
        record.peer_id
        for record in records
        if record.peer_id != me
        and record.state is not PeerState.LEAVING
        and not _same_place(record.addresses, addresses)
    ]


def choose(candidates: Sequence[PeerId], chance: Choice) -> list[PeerId]:
    return chance.sample(candidates, min(MOST_ASKED, len(candidates)))


def may_dial(address: str, own: Sequence[str]) -> bool:
    """Whether an address that somebody announced is dialled for it. Nobody shall learn from us what listens in our
    private network, or on this machine: such addresses are dialled only by who announces one of the kind itself."""
    kind = _kind(address)
    return kind == "global" or kind in map(_kind, own)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _kind(address: str) -> str:
    try:
        ip = ipaddress.ip_address(_host(address))
    except ValueError:
        return "name"
    return "loopback" if ip.is_loopback else "global" if ip.is_global else "private"


def _same_place(theirs: Sequence[str], ours: Sequence[str]) -> bool:
    """They share a public address, or one has no address that the other one has not. One private address in common
    proves nothing: every machine's virtual networks are numbered alike."""
    they, we = set(map(_host, theirs)), set(map(_host, ours))
    public = {_host(address) for address in theirs if _kind(address) == "global"}
    return bool(public & we) or they <= we or we <= they


class Quota:
    """Who is answered: each asker once a minute, few at once. Remembers a limited number of askers."""

    def __init__(self, *, every_s: float = ASK_EVERY_S, at_once: int = ANSWERED_AT_ONCE, most: int = _MOST_ASKERS):
        self._every_s, self._at_once, self._most = every_s, at_once, most
        self._asked: dict[PeerId, float] = {}
        self._running = 0

    def take(self, asker: PeerId, now: float) -> bool:
        """Whether to answer now. If so, call `done` at the end."""
        if self._running >= self._at_once or now - self._asked.get(asker, -self._every_s) < self._every_s:
            return False
        if len(self._asked) >= self._most:
            self._asked = {peer: at for peer, at in self._asked.items() if now - at < self._every_s}
            if len(self._asked) >= self._most:
                return False
        self._asked[asker] = now
        self._running += 1
        return True

    def done(self) -> None:
        self._running -= 1


class Reachability:
    """What is known of our own reachability, and what is news to the owner."""

    def __init__(self, addresses: Sequence[str]):
        self._addresses = tuple(addresses)
        self.reachable: bool | None = None  # None: not known

    def hear(self, answers: Sequence[Answer], others: int) -> Notice | None:
        """The answers of one round, of `others` who could be asked. That all is well is news only after a failure."""
        if any(answer.way is Way.DIRECT for answer in answers):
            before, self.reachable = self.reachable, True
            return Notice(True, "other peers can connect to this one now") if before is False else None
        if not answers or len({answer.by for answer in answers}) < min(AGREEING, others):
            return None
        before, self.reachable = self.reachable, False
        return self._unreachable(answers) if before is not False else None

    def _unreachable(self, answers: Sequence[Answer]) -> Notice:
        # Of what others say only our own addresses and our own words come before the owner's eyes.
        said = {address: reason for answer in answers for address, reason in answer.tried if reason in _TROUBLES}
        tried = tuple((address, said.get(address, FAILED)) for address in self._addresses)
        message = f"other peers cannot connect to {', '.join(f'{address} ({reason})' for address, reason in tried)}"
        streams = any(answer.way is Way.STREAM for answer in answers)
        until = "everything goes over slower relayed streams" if streams else "nobody can use this peer"
        return Notice(False, message, f"{HOW}; until then {until}", tried)
