"""`python -m bench.swarm_client MODEL CODE DTYPE WAIT_S WIRE`: `SwarmModel`, told by JSON lines what to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import aclosing
from statistics import median
from typing import Any

import torch
import uvloop

from routing.errors import SwarmError
from swarm.model import SwarmModel
from swarm.session import StepTrace

POLL_S = 0.2


async def main() -> None:
    torch.set_num_threads(1)
    requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    work = asyncio.current_task()
    assert work is not None
    threading.Thread(target=read, args=(requests, asyncio.get_running_loop(), work), daemon=True).start()
    # No round may be made easier by what the peers kept of one before.
    options: dict[str, Any] = {"dtype": sys.argv[3], "threads": 1, "share_prefixes": False}
    options |= {"wait_s": float(sys.argv[4]), "wire": sys.argv[5]}
    async with SwarmModel.connect(sys.argv[1], join=sys.argv[2], **options) as model:
        say({"event": "ready"})
        while True:
            request = await requests.get()
            try:
                say(await WORKS[request["do"]](model, request))
            except (SwarmError, TimeoutError) as error:
                say({"event": "failed", "error": f"{type(error).__name__}: {error}"})
            except BaseExceptionGroup as group:
                errors, rest = group.split(SwarmError)
                if errors is None or rest is not None:
                    raise
                first = errors.exceptions[0]
                say({"event": "failed", "error": f"{type(first).__name__}: {first}"})


def read(requests: asyncio.Queue[dict[str, Any]], loop: asyncio.AbstractEventLoop, work: asyncio.Task[None]) -> None:
    """On a thread: requests in; when they end, whatever is being done ends too."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(requests.put_nowait, json.loads(line))
    loop.call_soon_threadsafe(work.cancel)


async def generate(model: SwarmModel, request: dict[str, Any]) -> dict[str, Any]:
    """All prompts side by side, each in a session of its own, opened within the time that is measured."""
    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(one(model, prompt, request)) for prompt in request["prompts"]]
    return {"event": "done", "runs": [run.result() for run in runs]}


async def one(model: SwarmModel, prompt: Sequence[int] | str, request: dict[str, Any]) -> dict[str, Any]:
    ids: list[int] = []
    times: list[float] = []
    began, told = time.monotonic(), request["tell_at"] == 0
    traffic = model._client._endpoint.traffic
    before = traffic.bytes_out
    async with model.session(standby=request["standby"]) as session:
        session._session.healing.exclude(frozenset(request["without"]))
        stream = session.generate(
            prompt, timeout_s=request["timeout_s"], max_new_tokens=request["new"], do_sample=False, ignore_eos=True
        )
        async with aclosing(stream) as tokens:
            async for token in tokens:
                ids.append(token.id)
                times.append(token.at_s)
                ready = session.standbys_ready or request["standby"] != "warm"
                if not told and len(ids) >= request["tell_at"] and ready:
                    told = True
                    assert session.route is not None
                    say({"event": "reached", "route": [hop.peer_id for hop in session.route]})
                if request["most_s"] is not None and token.at_s - began > request["most_s"]:
                    break
        routes = [recovery.reason for recovery in session.recoveries]
        assert session.route is not None
        facts = {"began": began, "ids": ids, "times": times, "spent_ms": spent_ms(session.traces), "routes": routes}
        route, codecs = [hop.peer_id for hop in session.route], session._session.driver.codecs
        return facts | {
            "route": route,
            "codecs": [codec.name for codec in codecs.values()],
            "sent": traffic.bytes_out - before,  # by this process, to anybody
        }


async def beside(model: SwarmModel, request: dict[str, Any]) -> dict[str, Any]:
    """One prompt's answer, and in the midst of it another prompt's first token."""
    running = asyncio.create_task(one(model, request["prompts"][0], request))
    await asyncio.sleep(request["after_s"])
    other = await one(model, request["prompts"][1], {**request, "new": 1, "tell_at": 0})
    return {"event": "done", "runs": [await running, other]}


async def turns(model: SwarmModel, request: dict[str, Any]) -> dict[str, Any]:
    """The prompts as turns of one session, each appended to what was said before."""
    runs = []
    async with model.session() as session:
        for prompt in request["prompts"]:
            began, ids, times = time.monotonic(), [], []
            stream = session.generate(prompt, max_new_tokens=request["new"], do_sample=False, ignore_eos=True)
            async with aclosing(stream) as tokens:
                async for token in tokens:
                    ids.append(token.id)
                    times.append(token.at_s)
            runs.append({"began": began, "ids": ids, "times": times, "spent_ms": {}})
    return {"event": "done", "runs": runs}


async def twice(model: SwarmModel, request: dict[str, Any]) -> dict[str, Any]:
    """All prompts side by side, then all sessions again, each with one more token of its own."""
    async with contextlib.AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(model.session()) for _ in request["prompts"]]
        ids: list[list[int]] = [[] for _ in sessions]

        async def say_more(index: int, prompt: Sequence[int]) -> None:
            stream = sessions[index].generate(
                prompt, max_new_tokens=request["new"], do_sample=False, ignore_eos=True, timeout_s=request["timeout_s"]
            )
            async with aclosing(stream) as tokens:
                async for token in tokens:
                    ids[index].append(token.id)

        began = time.monotonic()
        for index, prompt in enumerate(request["prompts"]):
            await say_more(index, prompt)
        async with asyncio.TaskGroup() as group:
            for index in range(len(sessions)):
                group.create_task(say_more(index, ids[index][-1:]))
        ended = time.monotonic()
    runs = [{"began": began, "ids": said, "times": [ended] * len(said), "spent_ms": {}} for said in ids]
    return {"event": "done", "runs": runs}


def spent_ms(traces: Sequence[StepTrace]) -> dict[str, Any]:
    """Where the median decode step's time went, over all hops; and what each hop computed for the prompt."""
    steps = [trace for trace in traces if trace.tokens == 1]
    if not steps:
        return {}
    prefill = next((trace for trace in traces if trace.tokens > 1), None)
    return {
        "prefill": [] if prefill is None else [1e3 * hop.compute_s for hop in prefill.hops],
        "step": 1e3 * median(step.total_s for step in steps),
        "compute": 1e3 * median(sum(hop.compute_s for hop in step.hops) for step in steps),
        "queue": 1e3 * median(sum(hop.queue_s for hop in step.hops) for step in steps),
        "network": 1e3 * median(sum(hop.network_s for hop in step.hops) for step in steps),
    }


async def wait(model: SwarmModel, request: dict[str, Any]) -> dict[str, Any]:
    async with asyncio.timeout(request["timeout_s"]):
        while True:
            status = await model.status()
            if sum(peer.rtt_s is not None for peer in status.peers) >= request["peers"]:
                return {"event": "done"}
            await asyncio.sleep(POLL_S)


async def caches(model: SwarmModel, request: dict[str, Any]) -> dict[str, Any]:
    """Bytes of cache in use on each peer, as its record says."""
    status = await model.status()
    return {
        "event": "done",
        "held": [[peer.record.peer_id, peer.record.cache_total - peer.record.cache_free] for peer in status.peers],
    }


WORKS = {"generate": generate, "wait": wait, "caches": caches, "beside": beside, "turns": turns, "twice": twice}


def say(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(main())
