"""What a client says when its sessions are over, until it has arrived: a peer that does not hear it keeps what nobody
needs. Knows no session; connections come and go as its owner tells.
"""

from __future__ import annotations

import time
from collections import deque

from routing.types import PeerId
from swarm.frames import Frame
from swarm.link import Link

MOST_GOODBYES = 64  # kept for a peer that is not connected now
GOODBYE_S = 300.0  # after so long, a peer has noticed by itself that nobody speaks


class Goodbyes:
    def __init__(self) -> None:
        self._waiting: dict[PeerId, deque[Frame]] = {}  # for peers that are not connected
        self._said: dict[PeerId, deque[tuple[float, Frame]]] = {}  # the last ones on each link, which may not arrive

    def say(self, peer_id: PeerId, link: Link | None, frame: Frame) -> None:
        """To a peer that is not connected, or whose connection breaks, when it is again: it may be alive."""
        if link is not None:
            self._send(link, frame)
        else:
            self._later(peer_id, frame)

    def opened(self, link: Link) -> None:
        for frame in self._waiting.pop(link.remote, ()):
            self._send(link, frame)

    def lost(self, peer_id: PeerId) -> None:
        """Its connection broke."""
        for at, frame in self._said.pop(peer_id, ()):
            if time.monotonic() - at < GOODBYE_S:
                self._later(peer_id, frame)

    def forget(self, peer_id: PeerId) -> None:
        """It is gone for good."""
        self._waiting.pop(peer_id, None)

    def _send(self, link: Link, frame: Frame) -> None:
        self._said.setdefault(link.remote, deque(maxlen=MOST_GOODBYES)).append((time.monotonic(), frame))
        link.send(frame)

    def _later(self, peer_id: PeerId, frame: Frame) -> None:
        self._waiting.setdefault(peer_id, deque(maxlen=MOST_GOODBYES)).append(frame)
