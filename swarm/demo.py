"""The demonstration: a local swarm answers, loses a peer in mid-answer, and still says what one process would say.

Owns what is done and what is measured. How it is shown is `commands/demo.py`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routing.types import Hop, Route, Span
from swarm.figures import hop_times, longest_wait, rate, recovery_facts, route_facts
from swarm.local import LocalSwarm
from swarm.progress import Progress, silent
from swarm.render import DemoSummary, HopTimes, short_id

if TYPE_CHECKING:  # torch takes seconds to import: peers are started before
    from swarm.checkpoint import Checkpoint
    from swarm.generation import Token
    from swarm.healing import Recovery
    from swarm.model import SwarmModel
    from swarm.text import Messages

LEAST_TOKENS = 64  # a shorter answer shows little; the end-of-text token is not taken before


def spans(n_blocks: int) -> list[Span]:
    """Four peers of about half the model each, so that every block is held twice and any one of them can go."""
    half, more = n_blocks // 2, max(1, n_blocks // 10)
    if half - more < 1:
        return [Span(0, n_blocks)] * 2
    return [Span(0, half), Span(half, n_blocks), Span(0, half + more), Span(half - more, n_blocks)]


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the swarm said, and what happened meanwhile. `killed_at`: tokens that were there before the kill."""

    tokens: tuple[Token, ...]
    killed: Hop
    killed_at: int
    before: tuple[HopTimes, ...]
    after: tuple[HopTimes, ...]
    recoveries: tuple[Recovery, ...]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def times_s(self) -> list[float]:
        return [token.at_s for token in self.tokens]

    @property
    def stall_s(self) -> float:
        return longest_wait(self.times_s)

    def facts(self, local: Local) -> dict[str, Any]:
        """For JSON."""
        times = self.times_s
        return {
            "tokens_identical": self.ids == local.ids,
            "tokens": len(self.tokens),
            "tokens_per_s": round(rate(times), 2),
            "tokens_per_s_before": round(rate(times[: self.killed_at]), 2),
            "tokens_per_s_after": round(rate(times[self.killed_at :]), 2),
            "tokens_per_s_local": round(local.tokens_per_s, 2),
            "stall_ms": round(self.stall_s * 1e3, 1),
            "killed": self.killed.peer_id,
            "killed_blocks": f"{self.killed.entry}:{self.killed.exit}",
            "killed_at_token": self.killed_at,
            "route_before": route_facts(self.before),
            "route_after": route_facts(self.after),
            "recoveries": recovery_facts(self.recoveries),
            "finish": self.tokens[-1].finish,
            "text": self.text,
        }

    def summary(self, local: Local) -> DemoSummary:
        times = self.times_s
        return DemoSummary(
            event=f"peer {short_id(self.killed.peer_id)} was killed after {self.killed_at} tokens",
            before=self.before,
            after=self.after,
            tokens_per_s_before=rate(times[: self.killed_at]),
            tokens_per_s_after=rate(times[self.killed_at :]),
            stall_s=self.stall_s,
            identical=self.ids == local.ids,
        )


@dataclass(frozen=True, kw_only=True)
class Local:
    """What one process says, without any swarm."""

    ids: list[int]
    tokens_per_s: float


async def tell(
    swarm: LocalSwarm,
    model: SwarmModel,
    messages: Messages,
    tokens: int,
    *,
    on_token: Callable[[Token], object],
    on_kill: Callable[[Hop], object],
) -> Told:
    """Ask the swarm, and SIGKILL the last peer of the route in mid-answer. Raises what `SwarmModel` raises."""
    kill_at = min(2 * tokens // 5, LEAST_TOKENS - 1)  # an answer may end once it has LEAST_TOKENS
    killed: Hop | None = None
    before: tuple[HopTimes, ...] = ()
    said: list[Token] = []
    async with model.session() as session:
        stream = session.generate(messages, max_new_tokens=tokens, min_new_tokens=LEAST_TOKENS, do_sample=False)
        async with aclosing(stream):
            async for token in stream:
                said.append(token)
                on_token(token)
                if len(said) == kill_at:
                    route = _known(session.route)
                    killed, before = route[-1], hop_times(route, session.traces)
                    swarm.by_id(killed.peer_id).kill()
                    on_kill(killed)
        route = _known(session.route)
        # Only steps after the recovery went through the new route.
        after = hop_times(route, [trace for trace in session.traces if trace.at_s > said[kill_at - 1].at_s])
        recoveries = tuple(session.recoveries)
    assert killed is not None, "an answer is never shorter than LEAST_TOKENS"
    return Told(
        tokens=tuple(said), killed=killed, killed_at=kill_at, before=before, after=after, recoveries=recoveries
    )


def _known(route: Route | None) -> Route:
    assert route is not None, "tokens came, so there is a route"
    return route


def tell_locally(
    checkpoint: Checkpoint, messages: Messages, tokens: int, progress: Progress = silent
) -> Local:
    """The same question to `transformers` in this process, on one thread like each peer."""
    import torch

    from swarm.text import chat_ids

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = checkpoint.reference_model(torch.float32)
        ids = torch.tensor([chat_ids(checkpoint.tokenizer(), messages)])
        times: list[float] = []
        generation = checkpoint.generation_config()
        out: Any = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),  # else it masks tokens that equal the padding token
            max_new_tokens=tokens,
            min_new_tokens=LEAST_TOKENS,
            do_sample=False,
            eos_token_id=generation.eos_token_id,
            pad_token_id=generation.pad_token_id or 0,
            streamer=_Counter(times, tokens, progress),
        )
    finally:
        torch.set_num_threads(threads)
    return Local(ids=out[0, ids.shape[1] :].tolist(), tokens_per_s=rate(times))


class _Counter:
    """What `generate` calls a streamer: it is given the prompt, then each token."""

    def __init__(self, times: list[float], tokens: int, progress: Progress):
        self._times, self._tokens, self._progress = times, tokens, progress
        self._prompt = True

    def put(self, value: Any) -> None:
        if self._prompt:
            self._prompt = False
            return
        self._times.append(time.monotonic())
        self._progress("computing in one process", len(self._times), self._tokens)

    def end(self) -> None:
        self._progress("computing in one process", self._tokens, self._tokens)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """The index of the first token that differs; the shorter length if one begins with the other."""
    for index, (mine, other) in enumerate(zip(left, right, strict=False)):
        if mine != other:
            return index
    return min(len(left), len(right))
