"""What a session's rule is told and what it answers: who sent a frame, what to do, and the rule's limits."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from peer.seats import Work
from routing.types import PeerId
from swarm.frames import Frame, FrameType


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sent a frame. `link` tells connections of one client identity apart."""

    peer_id: PeerId
    role: str  # "client" or "peer"
    link: Hashable


@dataclass(slots=True)
class ToPeer:
    peer_id: PeerId
    frame: Frame


@dataclass(slots=True)
class ToLink:
    """An answer on the connection that a frame came on: a client's, or a stranger's."""

    link: Hashable
    frame: Frame


@dataclass(slots=True)
class Run:
    work: Work


@dataclass(slots=True)
class Reach:
    """A peer that this one will send to soon: dial it now."""

    peer_id: PeerId
    addresses: tuple[str, ...]


@dataclass(slots=True)
class Prepare:
    """A peer that this one may have to send to after a loss: be connected with it, if that can be."""

    peer_id: PeerId
    addresses: tuple[str, ...]


Effect = ToPeer | ToLink | Run | Reach | Prepare

ANSWERS = (FrameType.UNKNOWN, FrameType.ERROR, FrameType.BUSY)


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    hold_s: float = 2.0  # frames that came before their OPEN
    hold_frames: int = 64  # a connection
    hold_bytes: int = 1 << 20
    ask_again_s: float = 1.0
    idle_s: float = 1.0  # silent for so long, a session's content may be taken for another's; it heals by gaps
    client_gone_s: float = 120.0
    silent_s: float = 1800.0
    kept_s: float = 600.0  # what a closed session leaves for the client's next ones
    hops: int = 256
    chunk: int = 512  # most positions of a frame passed on
    ahead_bytes: int = 256 << 20  # that standbys keep and have not computed, all together
    retry_after_ms: int = 500
