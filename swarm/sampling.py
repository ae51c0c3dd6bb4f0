"""How the next token is chosen: the caller's settings and the sampler of one sequence.

Owns `GenerationSettings`, `Sampler` and `TokenBuffer`. The scores pass through the logits processors of
`transformers` itself, in the order in which its own `generate` applies them, so that the same settings and
the same seed give the same tokens. Knows nothing of text, sessions or peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from routing.errors import BadInput

DEFAULT_TOP_K = 50  # what `generate(do_sample=True)` of transformers uses when nobody says otherwise


def _whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool) and low <= value
    if not fits or (high is not None and value > high):
        allowed = f"{low} or more" if high is None else f"from {low} to {high}"
        raise BadInput(f"{name} must be a whole number, {allowed}; got {value!r}")


def _number(name: str, value: Any, allowed: str, inside: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not inside:
        raise BadInput(f"{name} must be a number {allowed}; got {value!r}")


def _above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")


def _up_to_one(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """What a caller may ask of a generation; names, ranges and meaning are those of `transformers`.

    `do_sample=None` samples if `temperature`, `top_k`, `top_p`, `min_p` or `seed` is given, else it is
    greedy. With `do_sample=False` those five have no effect. While sampling, an unset `top_k` is 50 and 0
    switches it off. `stop` are strings that end the text (they are not part of it); one string is taken as a
    tuple of one. `eos_token_ids` empty: those of the model. `ignore_eos` goes on after them, up to
    `max_new_tokens`.

    Raises BadInput.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        eos = (self.eos_token_ids,) if isinstance(self.eos_token_ids, int) else self.eos_token_ids
        if not isinstance(stop, Iterable) or not all(isinstance(text, str) and text for text in stop):
            raise BadInput(f"stop must be strings that are not empty; got {self.stop!r}")
        if not isinstance(eos, Iterable):
            raise BadInput(f"eos_token_ids must be token ids; got {self.eos_token_ids!r}")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "eos_token_ids", tuple(eos))
        for token_id in self.eos_token_ids:
            _whole("eos_token_ids", token_id, 0)
        _whole("max_new_tokens", self.max_new_tokens, 1)
        _whole("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        if self.do_sample not in (None, True, False):
            raise BadInput(f"do_sample must be True, False or None; got {self.do_sample!r}")
        if self.temperature == 0:
            raise BadInput("temperature must be above 0", advice="For greedy text use do_sample=False.")
        if self.temperature is not None:
            _number("temperature", self.temperature, "above 0", _above_zero(self.temperature))
        if self.top_k is not None:
            _whole("top_k", self.top_k, 0)
        if self.top_p is not None:
            _number("top_p", self.top_p, "from 0 to 1", _up_to_one(self.top_p))
        if self.min_p is not None:
            _number("min_p", self.min_p, "from 0 to 1", _up_to_one(self.min_p))
        if self.repetition_penalty is not None:
            inside = _above_zero(self.repetition_penalty)
            _number("repetition_penalty", self.repetition_penalty, "above 0", inside)
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**63 - 1)

    @property
    def samples(self) -> bool:
        """True: draws at random. False: takes the best token."""
        if self.do_sample is not None:
            return self.do_sample
        asked = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        return any(value is not None for value in asked)

    def with_model_defaults(self, generation_config: Any) -> GenerationSettings:
        """Fills what is unset from a model's `transformers.GenerationConfig`, as `generate` does.

        Whether to sample is the caller's choice alone and is not taken over.
        """
        filled: dict[str, Any] = {}
        if not self.eos_token_ids:
            eos = generation_config.eos_token_id
            filled["eos_token_ids"] = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        names = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
        for name in names if self.samples else names[:1]:
            if getattr(self, name) is None:
                filled[name] = getattr(generation_config, name, None)
        return replace(self, do_sample=self.samples, **filled)


class TokenBuffer:
    """Token ids as one growing tensor: appending costs O(1), and the view costs nothing."""

    def __init__(self, token_ids: Sequence[int] = ()):
        self._ids = torch.empty(max(256, 2 * len(token_ids)), dtype=torch.long)
        self._ids[: len(token_ids)] = torch.tensor(list(token_ids), dtype=torch.long)
        self._length = len(token_ids)

    def __len__(self) -> int:
        return self._length

    def append(self, token_id: int) -> None:
        if self._length == len(self._ids):
            self._ids = torch.cat([self._ids, torch.empty_like(self._ids)])
        self._ids[self._length] = token_id
        self._length += 1

    def truncate(self, length: int) -> None:
        """Forgets the ids from `length` on."""
        assert 0 <= length <= self._length
        self._length = length

    def view(self) -> torch.Tensor:
        """The ids, long [n]. Valid until the next change."""
        return self._ids[: self._length]


class Sampler:
    """Chooses the next tokens of one sequence; holds its random generator.

    `prompt_length` is the number of tokens before the first new one. The processors are those that
    `transformers.GenerationMixin._get_logits_processor` builds for the same settings, in its order.
    """

    def __init__(self, settings: GenerationSettings, *, prompt_length: int = 0):
        first, warpers = LogitsProcessorList(), LogitsProcessorList()
        penalty = settings.repetition_penalty
        if penalty is not None and penalty != 1:
            first.append(RepetitionPenaltyLogitsProcessor(float(penalty)))
        self.needs_context = bool(first)
        """Whether `next` needs the ids; if not, they may be left out."""
        self._samples = settings.samples
        if self._samples:
            if settings.temperature is not None and settings.temperature != 1:
                warpers.append(TemperatureLogitsWarper(float(settings.temperature)))
            top_k = DEFAULT_TOP_K if settings.top_k is None else settings.top_k
            if top_k != 0:
                warpers.append(TopKLogitsWarper(top_k))
            if settings.top_p is not None and settings.top_p < 1:
                warpers.append(TopPLogitsWarper(float(settings.top_p)))
            if settings.min_p is not None:
                warpers.append(MinPLogitsWarper(float(settings.min_p)))
        # The wait for min_new_tokens scans the vocabulary on every step, also when it is over.
        self._later = LogitsProcessorList([*first, *warpers])
        self._early = self._later
        self._early_until = 0
        if settings.min_new_tokens and settings.eos_token_ids and not settings.ignore_eos:
            wait = MinNewTokensLengthLogitsProcessor(
                prompt_length, settings.min_new_tokens, list(settings.eos_token_ids)
            )
            self._early = LogitsProcessorList([*first, wait, *warpers])
            self._early_until = prompt_length + settings.min_new_tokens
            self.needs_context = True
        self._generator = torch.Generator()
        if settings.seed is not None:
            self._generator.manual_seed(settings.seed)
        elif self._samples:
            self._generator.seed()

    def next(self, context_ids: torch.Tensor | None, logits: torch.Tensor) -> int:
        """The next token, from logits fp32 [vocab]; `context_ids` long [n] if `needs_context`."""
        if not (self._samples or self._early or self._later):
            return best(logits)
        ids: Any = _NO_IDS if context_ids is None else context_ids[None]
        processors = self._early if ids.shape[1] < self._early_until else self._later
        scores: Any = logits[None]
        if processors:
            scores = processors(ids, scores)
        if not self._samples:
            return best(scores[0])
        # Literally what `_sample` of transformers does: another way to draw gives other tokens for the seed.
        chances = torch.nn.functional.softmax(scores, dim=-1)
        return int(torch.multinomial(chances, num_samples=1, generator=self._generator))

    def state(self) -> bytes:
        """All that further draws depend on, apart from settings and context. Empty when greedy."""
        return self._generator.get_state().numpy().tobytes() if self._samples else b""

    def restore(self, state: bytes) -> None:
        """Goes back to a state taken by `state()` of a sampler with the same settings. Raises BadInput."""
        if not self._samples and not state:
            return
        if not self._samples or len(state) != len(self._generator.get_state()):
            raise BadInput("this is not the state of a sampler with these settings")
        self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def best(logits: torch.Tensor) -> int:
    """Index of the largest of fp32 [vocab] values, the first of equals, as `torch.argmax`."""
    if logits.device.type == "cpu":  # for 49,152 values numpy takes 4 us, torch 76 us
        return int(logits.detach().numpy().argmax())
    return int(logits.argmax())


_NO_IDS = torch.empty(1, 0, dtype=torch.long)
