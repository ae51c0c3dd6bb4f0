"""`python -m bench.forgetful MODEL ...`: a peer (`python -m peer`) that loses what it holds of a session now and then.

At each step, and at each input that a standby gets, with the probability in BENCH_FORGETS; seeded by the peer's own
process number. The rest of the peer lives on, as when a cache is lost or taken for others.
"""

from __future__ import annotations

import os
import random

from bench.setting import FORGETS
from peer.__main__ import main
from peer.effects import Sender
from peer.sessions import SessionTable
from swarm.frames import Frame, FrameType


def forgetful(probability: float) -> None:
    receive, rng = SessionTable.receive, random.Random(os.getpid())
    due: set[bytes] = set()

    def receive_or_forget(self: SessionTable, frame: Frame, sender: Sender, now: float) -> None:
        session = self.sessions.get(frame.session)
        if session is not None and frame.type in (FrameType.STEP, FrameType.FILL):
            if frame.end - frame.start == 1 and rng.random() < probability:
                due.add(session.id)
            seats = list(session.seats.values())
            if session.id in due and all(seat.working is None and not seat.inbox for seat in seats):
                due.discard(session.id)
                for seat in seats:
                    seat.evict()
        receive(self, frame, sender, now)

    SessionTable.receive = receive_or_forget  # type: ignore[method-assign]


if __name__ == "__main__":
    forgetful(float(os.environ[FORGETS]))
    main()
