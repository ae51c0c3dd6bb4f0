"""What `generate` and `chat` share: how the user wants to be answered, and how the answer's figures are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from routing.types import Route
from swarm.figures import hop_times, rate, recovery_facts, route_facts
from swarm.generation import Token
from swarm.healing import Recovery
from swarm.render import milliseconds
from swarm.sampling import GenerationSettings
from swarm.session import StepTrace


@dataclass(frozen=True, kw_only=True)
class Asking:
    """The options of the command line. None: the model's or the program's own choice."""

    model: str
    join: str
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    system: str | None = None
    wait_s: float = 0.0
    timeout_s: float | None = None
    standby: str = "inputs"
    only: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    trusted: tuple[str, ...] = ()
    dtype: str = "float32"
    exact: bool = False

    def connecting(self) -> dict[str, Any]:
        """What `SwarmModel.connect` takes of these, async or not."""
        limits = {"only": self.only or None, "never": self.never, "trusted": self.trusted or None}
        wire = "exact" if self.exact else "auto"
        options = {"join": self.join, "dtype": self.dtype, "wire": wire, "wait_s": self.wait_s, "standby": self.standby}
        return options | limits

    def settings(self, new_tokens: int) -> dict[str, Any]:
        """Fields of GenerationSettings."""
        chosen = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
        }
        return {"max_new_tokens": new_tokens, "stop": self.stop} | {
            name: value for name, value in chosen.items() if value is not None
        }

    def check(self) -> None:
        """What makes no sense is told before anything is begun. Raises BadInput."""
        GenerationSettings(**self.settings(self.max_new_tokens or 1))

    def new_tokens(self, default: int, room: int) -> int:
        """How many tokens an answer may have: `default` is cut to the room in the model's context, a wish is not."""
        return self.max_new_tokens or max(1, min(default, room))

    def messages(self, text: str) -> list[dict[str, str]]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, {"role": "user", "content": text}]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer and how it came about. `prompt_tokens`: all that was held when it began."""

    asked_s: float
    prompt_tokens: int
    tokens: Sequence[Token]
    route: Route | None
    traces: Sequence[StepTrace]
    recoveries: Sequence[Recovery]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def finish(self) -> str | None:
        return self.tokens[-1].finish if self.tokens else None

    @property
    def tokens_per_s(self) -> float:
        return rate([token.at_s for token in self.tokens])

    @property
    def first_token_s(self) -> float | None:
        return self.tokens[0].at_s - self.asked_s if self.tokens else None

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        hops = () if self.route is None else hop_times(self.route, self.traces)
        first = self.first_token_s
        return {
            "text": self.text,
            "ids": [token.id for token in self.tokens],
            "finish": self.finish,
            "prompt_tokens": self.prompt_tokens,
            "tokens": len(self.tokens),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "first_token_s": None if first is None else round(first, 3),
            "route": route_facts(hops),
            "recoveries": recovery_facts(self.recoveries),
        }

    def summary(self) -> str:
        """One line for people."""
        count = len(self.tokens)
        parts = [f"{count} token{'s' if count != 1 else ''}"]
        if count > 1:
            parts[0] += f" at {self.tokens_per_s:.1f}/s"
        if self.first_token_s is not None:
            parts.append(f"the first after {self.first_token_s:.1f} s")
        if self.route is not None:
            parts.append(f"through {self.route}")
        changes = [recovery for recovery in self.recoveries if recovery.before is not None]
        if changes:
            times = ", ".join(f"{milliseconds(change.seconds)} ms" for change in changes)
            parts.append(f"{len(changes)} change{'s' if len(changes) > 1 else ''} of route ({times})")
        if self.finish == "length":
            parts.append("cut at --max-new-tokens")
        return ", ".join(parts)
