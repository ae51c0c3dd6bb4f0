"""Between token ids and text: streaming detokenization, stop strings, and the ids of a chat.

Owns what must be remembered from token to token so that the text given out piece by piece is the text that
decoding all ids at once would give. Knows nothing of models, sessions or sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from routing.errors import BadInput

UNFINISHED = "�"  # what a decoder puts where bytes (not yet) form a character
CONTEXT_TOKENS = 6  # of the prompt: enough for decoders that look at what stands before a token
MOST_HELD = 8  # a character has at most 4 bytes: tokens that give no text for longer are not becoming one
KEPT = 4


class TextStream:
    """Detokenizes one token at a time, at a cost that does not grow with the text.

    The method is the one of serving engines (text-generation-inference, vLLM: prefix and read offset): a
    short window of tokens is decoded again with each token, and what is new at its end is given out. A
    decoder thus sees each token with its predecessor, which decides about leading spaces. Text that ends in
    an unfinished character waits until it is finished. `context_ids` are the tokens before the first new one.
    """

    def __init__(self, tokenizer: Any, context_ids: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._window = list(context_ids[-CONTEXT_TOKENS:])
        text = self._text()
        self._given = len(text) - text.endswith(UNFINISHED)  # characters of the window's text that are out
        self._held = 0  # tokens at the window's end whose text is not (wholly) out

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=True) if self._window else ""

    def push(self, token_id: int) -> str:
        """The text that this token makes final; often "" within a character. Special tokens give none."""
        self._window.append(token_id)
        self._held += 1
        text = self._text()
        if text.endswith(UNFINISHED) or len(text) <= self._given:
            return "" if self._held < MOST_HELD else self._move_on(text)
        released = text[self._given :]
        self._window = self._window[-self._held :]
        self._given = len(self._text())
        self._held = 0
        return released

    def _move_on(self, text: str) -> str:
        """Gives out broken bytes that no token can mend any more, so that the window stays short."""
        released = text[self._given : len(text) - text.endswith(UNFINISHED)]
        # Only the last character can still change, and its bytes lie in the last three tokens that have any.
        decode = self._tokenizer.decode
        visible = [token for token in self._window if decode([token], skip_special_tokens=True)]
        self._window = visible[-KEPT:]
        self._held = len(self._window)
        text = self._text()
        self._given = len(text) - text.endswith(UNFINISHED)
        return released

    def flush(self) -> str:
        """The rest, at the end. An unfinished character gives U+FFFD, as decoding all ids at once would."""
        released = self._text()[self._given :]
        self._window, self._given, self._held = [], 0, 0
        return released


class StopStrings:
    """Cuts a stream of text before the first stop string, which may lie across pieces.

    The first is the one that is complete first (a generation stops at once); of several that are complete at
    the same character, the longest. How the text is cut into pieces makes no difference. Text that may be the
    beginning of a stop string is held back until it is clear that it is not.
    """

    def __init__(self, stops: Sequence[str] = ()):
        if not all(stops):
            raise BadInput("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string found, if any; from then on no text comes out."""

    def push(self, piece: str) -> str:
        """The text that can be given out after `piece`."""
        if not self._stops:
            return piece
        if self.matched is not None or not piece:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text held back, when no more comes."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop` (not all of it)."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


Messages = Sequence[Mapping[str, Any]]
"""A chat as transformers knows it: `[{"role": "user", "content": "Hello"}, ...]`."""


def chat_ids(tokenizer: Any, messages: Messages, add_generation_prompt: bool = True) -> list[int]:
    """The token ids of a chat, rendered by the tokenizer's chat template. Raises BadInput."""
    if not tokenizer.chat_template:
        raise BadInput(
            "this model's tokenizer has no chat template",
            advice="Use an instruction-tuned model, set tokenizer.chat_template, or pass a plain prompt.",
        )
    if not messages or isinstance(messages, str | Mapping):
        raise BadInput('a chat is a list of messages such as {"role": "user", "content": "Hello"}')
    for message in messages:
        if not (isinstance(message, Mapping) and message.get("role") and "content" in message):
            raise BadInput(f'a message needs "role" and "content"; got {message!r}')
    try:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
        )
    except jinja2.TemplateError as error:
        raise BadInput(f"the model's chat template refuses these messages: {error}") from error
    return [int(token_id) for token_id in ids]


class NextTurn(NamedTuple):
    """A session forgets its tokens from position `keep` on and appends `append` (at least one token)."""

    keep: int
    append: list[int]


def next_turn_ids(
    tokenizer: Any, history_ids: Sequence[int], messages: Messages, add_generation_prompt: bool = True
) -> NextTurn:
    """What a session that holds `history_ids` needs to continue with this chat, without sending again what it
    has.

    The whole chat is rendered and compared with the history: answers that render to other ids than were
    generated, edited messages and another system prompt are all handled by going back to where the two part.
    Raises BadInput.
    """
    rendered = chat_ids(tokenizer, messages, add_generation_prompt)
    keep = common_prefix(history_ids, rendered)
    keep = min(keep, len(rendered) - 1)  # the last token is sent in any case: its output is what gets sampled
    return NextTurn(keep, rendered[keep:])


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of ids at the start in which both agree."""
    for index, (mine, other) in enumerate(zip(left, right, strict=False)):
        if mine != other:
            return index
    return min(len(left), len(right))
