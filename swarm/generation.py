"""The loop that turns one open session into text: step, score, sample, decode, stop.

Owns the order of things for one sequence and the promise that a session stays usable however the loop ends.
Knows nothing of the network: a session (`Steps`) and the model's head (`Scorer`) are handed in. Time is the
caller's clock.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from routing.errors import BadInput, PromptTooLong
from swarm.sampling import GenerationSettings, Sampler, TokenBuffer
from swarm.text import CONTEXT_TOKENS, StopStrings, TextStream


class Steps(Protocol):
    """One open session of the swarm."""

    @property
    def position(self) -> int:
        """Number of tokens held."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens held."""
        ...

    async def step(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Appends tokens; the hidden state [1, hidden] of the last one."""
        ...

    def rollback(self, position: int) -> None:
        """Forgets the tokens from `position` on."""
        ...


class Scorer(Protocol):
    """The model's final norm and head; a client may batch it over its sessions."""

    async def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [1, hidden] to logits fp32 [vocab]."""
        ...


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `text` is what became final with it (it may be "", or belong to tokens before)."""

    id: int
    text: str
    index: int  # 0 for the first new token
    at_s: float  # the caller's clock, when it was sampled
    finish: str | None = None  # on the last one: "eos", "stop" or "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A finished generation. Times in seconds on the caller's clock."""

    text: str
    ids: tuple[int, ...]
    finish: str | None  # None: the stream ended before its end (cancelled)
    token_times_s: tuple[float, ...]

    @classmethod
    async def collect(cls, tokens: AsyncIterator[Token]) -> GenerationResult:
        """Waits for all tokens of a stream."""
        return cls.of([token async for token in tokens])

    @classmethod
    def of(cls, tokens: Sequence[Token]) -> GenerationResult:
        return cls(
            text="".join(token.text for token in tokens),
            ids=tuple(token.id for token in tokens),
            finish=tokens[-1].finish if tokens else None,
            token_times_s=tuple(token.at_s for token in tokens),
        )

    @property
    def tokens_per_s(self) -> float:
        """Rate between the first token and the last; 0 for fewer than two."""
        if len(self.ids) < 2:
            return 0.0
        return (len(self.ids) - 1) / max(self.token_times_s[-1] - self.token_times_s[0], 1e-9)


@dataclass(slots=True, eq=False)
class Unfinished:
    """A generation under way, as far as another process needs it to go on with the same text."""

    held: int  # tokens of the session before it
    new_ids: list[int]
    settings: GenerationSettings
    said: list[int] = field(default_factory=list)
    state: bytes = b""  # of the sampler, to begin with
    sampler: Sampler | None = None

    def sampler_state(self) -> bytes:
        return self.state if self.sampler is None else self.sampler.state()

    @property
    def position(self) -> int:
        """Tokens that the session holds for certain: all but the last one said, which goes with the next step."""
        return self.held + len(self.new_ids) + len(self.said) - 1 if self.said else self.held


async def generate(
    steps: Steps,
    scorer: Scorer,
    tokenizer: Any,
    new_ids: Sequence[int],
    settings: GenerationSettings,
    *,
    clock: Callable[[], float],
    max_context: int | None = None,
    unfinished: Unfinished | None = None,
) -> AsyncGenerator[Token, None]:
    """Appends `new_ids` to the session; yields tokens up to an end-of-text token, a stop string or the limit.

    It may be closed or cancelled at any moment. The session then holds what it held before, `new_ids`, and
    all tokens yielded but the last, which goes with whatever is appended next. If no token was yielded, it
    holds what it held before.

    `unfinished`, made of the same prompt and settings, is kept up to date; if something was said already, the rest
    follows, in a session that holds `unfinished.position` tokens.

    An end-of-text token is yielded but gives no text. A stop string that names a special token stops there
    too. Raises BadInput for an empty prompt and PromptTooLong if prompt and new tokens exceed `max_context`,
    both before anything is sent; and what `steps` and `scorer` raise.
    """
    new_ids = list(new_ids)
    if unfinished is None:
        unfinished = Unfinished(steps.position, new_ids, settings)
    held, said = unfinished.held, unfinished.said
    _check(held, new_ids, settings, max_context)
    settings = _with_eos(settings, tokenizer)
    length = held + len(new_ids)
    eos = frozenset() if settings.ignore_eos else frozenset(settings.eos_token_ids)
    stop_ids = _special_ids(settings.stop, tokenizer)
    sampler = Sampler(settings, prompt_length=length)
    if state := unfinished.sampler_state():
        sampler.restore(state)
    unfinished.sampler = sampler
    earlier = list(steps.token_ids[:held])
    context = TokenBuffer([*earlier, *new_ids, *said]) if sampler.needs_context else None
    before = earlier[max(0, held - CONTEXT_TOKENS) :]
    stream = TextStream(tokenizer, [*before, *new_ids[-CONTEXT_TOKENS:]])
    stops = StopStrings(settings.stop)

    for token_id in said:
        stops.push(stream.push(token_id))
    sending = said[-1:] or new_ids
    for index in range(len(said), settings.max_new_tokens):
        logits = await _advance(steps, scorer, sending)
        token_id = sampler.next(context.view() if context is not None else None, logits)
        at_s = clock()
        finish = None
        if token_id in eos:
            finish, text = "eos", ""
        elif token_id in stop_ids:
            finish, text = "stop", ""
        else:
            text = stops.push(stream.push(token_id))
        if finish is None and stops.matched is None and index + 1 == settings.max_new_tokens:
            finish = "length"
        if finish is not None:
            text += stops.push(stream.flush())
            if stops.matched is None:
                text += stops.finish()
        if stops.matched is not None:
            finish = "stop"
        said.append(token_id)
        yield Token(token_id, text, index, at_s, finish)
        if finish is not None:
            return
        if context is not None:
            context.append(token_id)
        sending = [token_id]


async def _advance(steps: Steps, scorer: Scorer, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits after one step, which counts as a whole or not at all, also when it is cancelled half-way."""
    position = steps.position
    done = False
    try:
        logits = await scorer.logits(await steps.step(token_ids))
        done = True
        return logits
    finally:
        if not done and steps.position > position:
            steps.rollback(position)


def _check(held: int, new_ids: Sequence[int], settings: GenerationSettings, max_context: int | None) -> None:
    if not new_ids:
        raise BadInput("the prompt is empty", advice="Give at least one token, a start token for example.")
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in new_ids):
        raise BadInput("the prompt must be token ids: whole numbers of 0 or more")
    if max_context is not None and held + len(new_ids) + settings.max_new_tokens > max_context:
        raise PromptTooLong(
            f"{held + len(new_ids)} tokens of prompt and {settings.max_new_tokens} new ones are more than "
            f"the {max_context} that this model's context holds"
        )


def _with_eos(settings: GenerationSettings, tokenizer: Any) -> GenerationSettings:
    if settings.eos_token_ids or tokenizer.eos_token_id is None:
        return settings
    return replace(settings, eos_token_ids=(tokenizer.eos_token_id,))


def _special_ids(stop: Sequence[str], tokenizer: Any) -> frozenset[int]:
    """Special tokens never show in the text, so a stop string that is one has to be compared by id."""
    if not stop:
        return frozenset()
    return frozenset(
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content in stop
    )
