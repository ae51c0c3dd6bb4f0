"""Which of a peer's models a frame is for: a session's id begins as its swarm's does.

Owns nothing but that; each model's sessions are its own (`succession.py`). All of them share the links.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from peer.succession import Succession
from routing.errors import BadInput
from swarm.frames import SWARM_BYTES, Frame, FrameType, Problem
from swarm.link import Link

log = logging.getLogger(__name__)


class Switchboard:
    """A LinkHandler for the models of one peer."""

    def __init__(self) -> None:
        self._models: dict[bytes, Succession] = {}  # by the beginning of their sessions' ids

    @property
    def models(self) -> Collection[Succession]:
        return self._models.values()

    def add(self, swarm_id: bytes, model: Succession) -> None:
        """Before there are links. Raises BadInput if its sessions could not be told from those of another one."""
        if swarm_id[:SWARM_BYTES] in self._models:
            raise BadInput("a peer cannot serve the same model twice")
        self._models[swarm_id[:SWARM_BYTES]] = model
        services = [each.current for each in self.models]
        for service in services:
            service.fellows = services

    @property
    def computed_sessions(self) -> int:
        return sum(model.computed_sessions for model in self.models)

    # -- LinkHandler -----------------------------------------------------------------------------------------

    def link_opened(self, link: Link) -> None:
        for model in self.models:
            model.link_opened(link)

    def frame_received(self, link: Link, frame: Frame) -> None:
        model = self._models.get(frame.session[:SWARM_BYTES])
        if model is not None:
            model.frame_received(link, frame)
        elif frame.type is FrameType.OPEN:
            problem = Problem("refused", "this peer serves no model with such sessions")
            link.send(Frame(type=FrameType.ERROR, session=frame.session, epoch=frame.epoch, body=problem))
        else:
            log.debug("a %s frame of %s is of no swarm of this peer", frame.type.name, link.remote)

    def link_lost(self, link: Link, reason: str) -> None:
        for model in self.models:
            model.link_lost(link, reason)
