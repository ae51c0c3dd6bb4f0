"""Sessions that outlive their client: the same text goes on in another process, on warm caches where they are."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from routing.errors import BadInput, NoRoute, Superseded, TimedOut
from swarm.frames import FrameType
from swarm.local import LocalSwarm
from swarm.model import TextSession
from tests.whole.inprocess import InProcessModel, InProcessSwarm
from tests.whole.reference import Reference

PROMPT = "A text that is never lost: "
CHAIN = ["0:3", "3:6"]
NEW = 20
SETTINGS: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}


async def begin(model: InProcessModel, path: Path, count: int, **more: Any) -> tuple[TextSession, list[int]]:
    """The first tokens of a generation in a session that is then left as it is."""
    session, ids = model.session(), []
    stream = session.generate(PROMPT, save_to=path, **SETTINGS, **more)
    async for token in stream:
        ids.append(token.id)
        if len(ids) == count:
            break
    await stream.aclose()
    return session, ids


async def rest(session: TextSession) -> list[int]:
    return [token.id async for token in session.rest()]


def computed(swarm: InProcessSwarm) -> list[int]:
    """Positions that each peer was sent so far."""
    return [peer.positions(FrameType.STEP) + peer.positions(FrameType.FILL) for peer in swarm.peers]


@pytest.mark.parametrize("more", [{}, {"seed": 7, "temperature": 1.3}], ids=["greedy", "drawn"])
async def test_another_process_goes_on_where_the_first_one_was(
    more: dict[str, Any], tiny: Path, local: Reference, tmp_path: Path
) -> None:
    path = tmp_path / "text.json"
    async with InProcessSwarm(tiny, CHAIN) as swarm, swarm.model() as first, swarm.model() as second:
        whole = [token.id async for token in first.generate(PROMPT, **SETTINGS, **more)]
        old, begun = await begin(first, path, 8, **more)
        before = computed(swarm)
        async with second.resume(path) as session:
            assert session.said == begun and session.token_ids == old.token_ids
            assert begun + await rest(session) == whole
            # Warm: only what is new was sent.
            assert all(after - sent <= NEW - 8 + 1 for sent, after in zip(before, computed(swarm), strict=True))
            with pytest.raises(Superseded):
                await rest(old)
            assert await rest(session) == [] == session.said
            session.save(path)
        if not more:
            assert whole == local.greedy(local.ids(PROMPT), NEW)
        async with second.resume(path) as session:
            assert session.said == [] and len(session.token_ids) == len(local.ids(PROMPT)) + NEW - 1
        await old.__aexit__()


@pytest.mark.parametrize("change", ["peers", "identity", "route"])
async def test_where_nothing_is_warm_it_is_computed_again(
    change: str, tiny: Path, local: Reference, tmp_path: Path
) -> None:
    path = tmp_path / "text.json"
    expected = local.greedy(local.ids(PROMPT), NEW)
    async with InProcessSwarm(tiny, CHAIN) as swarm:
        async with swarm.model() as first:
            old, begun = await begin(first, path, 5)
            if change == "peers":
                for peer in list(swarm.peers):
                    await swarm.restart(peer)
            elif change == "route":
                await asyncio.to_thread(swarm.peers[0].kill)
                await swarm.add("0:4")
            async with (
                swarm.model(client="another" if change == "identity" else "client") as second,
                second.resume(path) as session,
            ):
                assert begun + await rest(session) == expected
            await old.__aexit__()
        await swarm.all_closed()


async def test_it_may_be_saved_before_the_first_token_and_after_going_back(
    tiny: Path, local: Reference, tmp_path: Path
) -> None:
    path = tmp_path / "text.json"
    async with InProcessSwarm(tiny, CHAIN) as swarm, swarm.model() as model:
        async with model.session() as session:
            session.save(path)
        async with model.resume(path) as session:
            assert session.token_ids == [] and await rest(session) == []
            ids = [token.id async for token in session.generate(PROMPT, **SETTINGS)]
            assert ids == local.greedy(local.ids(PROMPT), NEW)
            session.rollback(3)
            session.save(path)
        async with model.resume(path) as session:
            assert session.token_ids == local.ids(PROMPT)[:3]


async def test_a_text_that_broke_off_goes_on_in_its_own_session(tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny, CHAIN) as swarm, swarm.model(recovery_s=0.3) as model, model.session() as session:
        ids: list[int] = []
        with pytest.raises((NoRoute, TimedOut)):
            async for token in session.generate(PROMPT, **SETTINGS):
                ids.append(token.id)
                if len(ids) == 6:
                    await asyncio.to_thread(swarm.peers[1].kill)
                    del swarm.directory.records[swarm.peers[1].peer_id]
        await swarm.add("3:6")
        assert session.said == ids
        assert ids + await rest(session) == local.greedy(local.ids(PROMPT), NEW)


async def test_a_chat_goes_on_with_its_messages(tiny: Path, tmp_path: Path) -> None:
    path, settings = tmp_path / "chat.json", {"max_new_tokens": 12, "ignore_eos": True, "seed": 5}
    async with InProcessSwarm(tiny, CHAIN) as swarm, swarm.model() as first, swarm.model() as second:
        async with first.chat("Be brief.") as chat:
            for question in ("Who are you?", "And I?"):
                whole = [token.text async for token in chat.send(question, **settings)]
            expected = list(chat.messages)
        chat = first.chat("Be brief.")
        _ = [token async for token in chat.send("Who are you?", save_to=path, **settings)]
        stream = chat.send("And I?", save_to=path, **settings)
        begun = [(await anext(stream)).text for _ in range(5)]
        await stream.aclose()
        assert chat.messages[-1] == {"role": "assistant", "content": "".join(begun)}
        before = computed(swarm)
        async with second.resume_chat(path) as resumed:
            assert resumed.messages == chat.messages
            assert begun + [token.text async for token in resumed.rest(save_to=path)] == whole
            assert resumed.messages == expected
            assert all(after - sent <= 12 - 5 + 1 for sent, after in zip(before, computed(swarm), strict=True))
            assert [token async for token in resumed.rest()] == []
            _ = [token async for token in resumed.send("So?", save_to=path, **settings)]
            assert resumed.messages[: len(expected)] == expected and len(resumed.messages) == len(expected) + 2
        async with second.resume_chat(path) as resumed:
            assert len(resumed.messages) == len(expected) + 2 and resumed.session.said == []
        await chat.__aexit__()


async def test_a_turn_that_is_not_answered_yet_is_not_in_a_saved_chat(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    async with InProcessSwarm(tiny, CHAIN) as swarm, swarm.model() as model:
        async with model.chat() as chat:
            asked = asyncio.create_task(anext(chat.send("Who are you?", **SETTINGS)))
            await asyncio.sleep(0)  # it has begun, and waits for its first step
            assert chat.session._unfinished is not None
            chat.save(path)
            await asked
            chat.save(tmp_path / "later.json")
        async with model.resume_chat(path) as resumed:
            assert resumed.messages == [] == resumed.session.token_ids
            assert [token async for token in resumed.rest()] == []
        async with model.resume_chat(tmp_path / "later.json") as resumed:
            assert len(resumed.session.said) == 1 and len(resumed.messages) == 2
        async with model.session() as session:
            session.save(path)
        with pytest.raises(BadInput, match="no chat"):
            model.resume_chat(path)


async def test_a_session_of_other_weights_is_refused(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.json"
    async with InProcessSwarm(tiny, CHAIN) as swarm, swarm.model() as model:
        async with model.session() as session:
            session.save(path)
        changed = json.loads(path.read_text())
        generation = {"held": 0, "prompt": [1], "said": [], "settings": {}, "sampler": ""}
        for key, value, named in (
            ("fingerprint", "", "other weights"),
            ("generation", {**generation, "held": 3}, "does not hold"),
            ("generation", {**generation, "settings": {"x": 1}}, "unknown setting"),
        ):
            path.write_text(json.dumps({**changed, key: value}))
            with pytest.raises(BadInput, match=named):
                model.resume(path)


SCRIPT = """
import sys
from swarm.sync import SwarmModel

with SwarmModel.connect(sys.argv[1], join=sys.argv[2], threads=1) as model:
    if sys.argv[4] == "begin":
        with model.session() as session:
            for token in session.generate({prompt!r}, save_to=sys.argv[3], max_new_tokens=64, ignore_eos=True):
                print(token.id, flush=True)
    else:
        with model.resume(sys.argv[3]) as session:
            print(*session.said)
            print(*(token.id for token in session.rest()))
"""


@pytest.mark.processes
def test_a_client_that_is_killed_goes_on_in_a_new_process(tiny: Path, local: Reference, tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path)}
    with LocalSwarm(str(tiny), CHAIN) as swarm:
        command = [sys.executable, "-c", SCRIPT.format(prompt=PROMPT), str(tiny), swarm.join_code, str(tmp_path / "t")]
        with subprocess.Popen([*command, "begin"], stdout=subprocess.PIPE, text=True, env=environment) as client:
            assert client.stdout is not None
            seen = [int(client.stdout.readline()) for _ in range(9)]
            client.send_signal(signal.SIGKILL)
        done = subprocess.run(
            [*command, "rest"], capture_output=True, text=True, env=environment, timeout=120, check=True
        )
    said, more = ([int(word) for word in line.split()] for line in done.stdout.splitlines())
    assert said[:9] == seen and len(said) < 64
    assert said + more == local.greedy(local.ids(PROMPT), 64)
