"""Real processes: the last peer of some blocks leaves in mid-answer, and another comes to take them."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch

from swarm.checkpoint import open_checkpoint
from swarm.local import LocalPeer, LocalSwarm
from swarm.model import SwarmModel
from tests.whole.reference import Reference

pytestmark = pytest.mark.processes

PROMPT = "Explain in a few sentences why the sea is salt:"
MOST_TOKENS = 1200
AFTER = 16  # tokens that must still come on the new route


def listen(peer: LocalPeer, events: list[dict[str, Any]]) -> None:
    """To what it says once it serves."""

    def read() -> None:
        assert peer.process.stdout is not None
        events.extend(json.loads(line) for line in peer.process.stdout)

    threading.Thread(target=read, daemon=True).start()


async def test_a_peer_takes_the_blocks_of_one_that_leaves_and_no_answer_stands_still() -> None:
    events: list[dict[str, Any]] = []
    options = ["--most-blocks", "15"]  # it looks because it hears of it, not because two minutes are over
    with LocalSwarm("smollm2", [None], options=options) as swarm:
        last, spare = swarm.add(), swarm.add()
        first = swarm.peers[0]
        assert (first.facts["span"], last.facts["span"]) == ("0:15", "15:30")
        listen(spare, events)
        async with SwarmModel.connect("smollm2", join=swarm.join_code) as model, model.session() as session:
            ids, got, times, moved_at = model.encode(PROMPT), [], [], 0
            async for token in session.generate(ids, max_new_tokens=MOST_TOKENS, ignore_eos=True):
                got.append(token.id)
                times.append(token.at_s)
                if len(got) == 24:
                    last.ask_to_leave()
                assert session.route is not None
                if not moved_at and len(got) > 24 and last.peer_id not in session.route.peers:
                    moved_at = len(got)
                if moved_at and len(got) >= moved_at + AFTER:
                    break
            assert moved_at and session.route.peers == {first.peer_id, spare.peer_id}
            assert last.ended(10.0) == 0 and {"event": "moved", "model": "smollm2", "span": "15:30"} in events
            stall = max(after - before for before, after in pairwise(times))
            print(f"moved after {moved_at} tokens; longest time between two tokens: {1e3 * stall:.0f} ms")
            assert stall < 2.0  # loading alone takes longer
        checkpoint = open_checkpoint("smollm2")
        local = Reference.of(checkpoint.reference_model(torch.float32), checkpoint.tokenizer())
        local.check(ids, got, len(got))
