"""The generation loop over a local stand-in for a session, against `transformers.generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.errors import BadInput, NoRoute, PromptTooLong
from swarm.generation import GenerationResult, Unfinished, generate
from swarm.sampling import GenerationSettings
from swarm.text import next_turn_ids
from tests.tiny import tiny_model, tiny_tokenizer

torch.set_num_threads(1)
MODEL = tiny_model("llama", layers=2)
MODEL.generation_config.eos_token_id = None
TOKENIZER = tiny_tokenizer()
PROMPT = TOKENIZER.encode("The house")


class LocalSession:
    """One session of the whole model in this process. Counts what was sent; can be told to fail."""

    def __init__(self, token_ids: Sequence[int] = ()):
        self.token_ids: list[int] = list(token_ids)
        self.sent: list[list[int]] = []
        self.fail_at: int | None = None  # the step that is broken off half-way
        self.entered = asyncio.Event()
        self.gate: asyncio.Event | None = None

    @property
    def position(self) -> int:
        return len(self.token_ids)

    async def step(self, token_ids: Sequence[int]) -> torch.Tensor:
        self.sent.append(list(token_ids))
        self.token_ids += token_ids
        self.entered.set()
        if self.gate is not None:
            await self.gate.wait()
        if len(self.sent) - 1 == self.fail_at:
            raise NoRoute("block 1 is served by nobody", blocks=[1])
        with torch.no_grad():
            return MODEL.model(torch.tensor([self.token_ids])).last_hidden_state[0, -1:]

    def rollback(self, position: int) -> None:
        assert position <= self.position
        del self.token_ids[position:]


class LocalHead:
    async def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return MODEL.lm_head(hidden)[0].float()


class ScriptedHead:
    """Makes the model say given ids, then one id for ever."""

    def __init__(self, ids: Sequence[int], after: int):
        self.ids = iter(ids)
        self.after = after

    async def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(TOKENIZER.vocab_size + len(TOKENIZER.all_special_ids))
        logits[next(self.ids, self.after)] = 1.0
        return logits


def run(session, new_ids, asked: GenerationSettings, head=None, max_context=None):
    clock = count()
    return generate(
        session, head or LocalHead(), TOKENIZER, new_ids, asked, clock=lambda: float(next(clock)),
        max_context=max_context,
    )  # fmt: skip


def theirs(prompt: list[int], seed: int | None = None, **asked) -> list[int]:
    if seed is not None:
        torch.manual_seed(seed)
    out = MODEL.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), use_cache=False,
        do_sample=seed is not None, pad_token_id=3, **asked,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


async def test_greedy_is_that_of_transformers():
    session = LocalSession()
    result = await GenerationResult.collect(run(session, PROMPT, GenerationSettings(max_new_tokens=40)))
    expected = theirs(PROMPT, max_new_tokens=40, eos_token_id=2)
    assert list(result.ids) == expected and len(set(expected)) > 5
    assert result.text == TOKENIZER.decode(expected, skip_special_tokens=True)
    assert result.finish == "length"
    assert session.token_ids == PROMPT + expected[:-1]
    assert session.sent == [PROMPT, *([token] for token in expected[:-1])]
    assert result.token_times_s == tuple(map(float, range(40))) and result.tokens_per_s == 1.0


async def test_drawn_tokens_are_those_of_transformers():
    asked = {"temperature": 1.4, "top_k": 30, "top_p": 0.95, "repetition_penalty": 1.2, "min_new_tokens": 5}
    wanted = GenerationSettings(max_new_tokens=30, seed=11, eos_token_ids=tuple(range(40, 120)), **asked)
    result = await GenerationResult.collect(run(LocalSession(), PROMPT, wanted))
    expected = theirs(PROMPT, 11, max_new_tokens=30, eos_token_id=list(range(40, 120)), **asked)
    assert list(result.ids) == expected and len(expected) >= 5
    assert result.finish == ("eos" if expected[-1] in range(40, 120) else "length")


async def test_eos_is_an_id_but_no_text():
    said = TOKENIZER.encode("Yes.")
    session = LocalSession()
    head = ScriptedHead(said, after=TOKENIZER.eos_token_id)
    tokens = [token async for token in run(session, PROMPT, GenerationSettings(), head)]
    assert [token.id for token in tokens] == [*said, TOKENIZER.eos_token_id]
    assert [token.text for token in tokens] == ["Y", "e", "s", ".", ""]
    assert [token.finish for token in tokens] == [None] * 4 + ["eos"]
    assert session.token_ids == PROMPT + said

    head = ScriptedHead(said, after=TOKENIZER.eos_token_id)
    asked = GenerationSettings(ignore_eos=True, max_new_tokens=7)
    result = await GenerationResult.collect(run(LocalSession(), PROMPT, asked, head))
    assert (result.text, len(result.ids), result.finish) == ("Yes.", 7, "length")


async def test_stop_strings_cut_the_text():
    said = TOKENIZER.encode("Hi\nUs\nUser: more")
    asked = GenerationSettings(stop=("\nUser:", "zzz"), max_new_tokens=50)
    result = await GenerationResult.collect(run(LocalSession(), PROMPT, asked, ScriptedHead(said, after=5)))
    assert (result.text, result.finish) == ("Hi\nUs", "stop")
    assert TOKENIZER.decode(result.ids) == "Hi\nUs\nUser:"


@pytest.mark.parametrize(("limit", "text"), [(3, "Hi\n"), (4, "Hi\nU"), (8, "Hi\nUser")])
async def test_text_held_back_comes_at_the_end(limit, text):
    said = TOKENIZER.encode("Hi\nUser: more")
    asked = GenerationSettings(stop=("\nUser:",), max_new_tokens=limit)
    result = await GenerationResult.collect(run(LocalSession(), PROMPT, asked, ScriptedHead(said, after=5)))
    assert (result.text, result.finish) == (text if limit < 8 else "Hi", "length" if limit < 8 else "stop")


async def test_a_special_token_can_be_a_stop_string():
    said = [*TOKENIZER.encode("Hi"), *TOKENIZER.convert_tokens_to_ids(["<|im_start|>"])]
    asked = GenerationSettings(stop="<|im_start|>")
    result = await GenerationResult.collect(run(LocalSession(), PROMPT, asked, ScriptedHead(said, after=5)))
    assert (result.text, result.finish, len(result.ids)) == ("Hi", "stop", 3)


async def test_a_character_cut_off_by_the_limit_shows_as_decoding_shows_it():
    said = TOKENIZER.encode("é😀")
    asked = GenerationSettings(max_new_tokens=4)
    tokens = [t async for t in run(LocalSession(), PROMPT, asked, ScriptedHead(said, after=5))]
    assert [token.text for token in tokens] == ["", "é", "", "\ufffd"]
    assert "".join(token.text for token in tokens) == TOKENIZER.decode(said[:4])


@settings(max_examples=25)
@given(st.integers(0, 12), st.booleans())
def test_leaving_early_keeps_a_session_that_continues(leave_after, drawn):
    async def scenario() -> None:
        asked = GenerationSettings(max_new_tokens=12, seed=5 if drawn else None)
        session = LocalSession()
        stream = run(session, PROMPT, asked)
        seen = [(await anext(stream)).id for _ in range(leave_after)]
        await stream.aclose()
        held = session.token_ids
        assert held == (PROMPT + seen[:-1] if seen else [])  # the last token goes with the next step

        rest = (PROMPT + seen)[len(held) :] + TOKENIZER.encode(" and")
        result = await GenerationResult.collect(run(session, rest, GenerationSettings(max_new_tokens=6)))
        expected = theirs(PROMPT + seen + TOKENIZER.encode(" and"), max_new_tokens=6, eos_token_id=2)
        assert list(result.ids) == expected

    asyncio.run(scenario())


@pytest.mark.parametrize("broken", [0, 3])
async def test_a_broken_step_is_taken_back(broken):
    session = LocalSession([7, 8])
    session.fail_at = broken
    stream = run(session, PROMPT, GenerationSettings(max_new_tokens=9))
    seen = [(await anext(stream)).id for _ in range(broken)]
    with pytest.raises(NoRoute):
        await anext(stream)
    assert session.token_ids == ([7, 8] if broken == 0 else [7, 8, *PROMPT, *seen[:-1]])


async def test_a_cancelled_step_is_taken_back():
    session = LocalSession([7, 8])
    session.gate = asyncio.Event()
    waiting = asyncio.ensure_future(anext(run(session, PROMPT, GenerationSettings())))
    await session.entered.wait()
    assert session.position > 2
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert session.token_ids == [7, 8]


async def test_a_step_without_a_score_is_taken_back():
    class BrokenHead(LocalHead):
        async def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            if session.position > len(PROMPT):
                raise NoRoute("gone")
            return await super().logits(hidden)

    session = LocalSession()
    stream = run(session, PROMPT, GenerationSettings(), BrokenHead())
    await anext(stream)
    with pytest.raises(NoRoute):
        await anext(stream)
    assert session.token_ids == PROMPT and len(session.sent) == 2


async def test_what_cannot_work_is_refused_before_anything_is_sent():
    session = LocalSession([7, 8])
    asked = GenerationSettings(max_new_tokens=10)
    room = 2 + len(PROMPT) + 10
    for new_ids, limit, error in (
        ([], None, BadInput),
        ([1, -1], None, BadInput),
        (["a"], None, BadInput),
        (PROMPT, room - 1, PromptTooLong),
    ):
        with pytest.raises(error):
            await anext(run(session, new_ids, asked, max_context=limit))
        assert session.sent == [] and session.token_ids == [7, 8]
    result = await GenerationResult.collect(run(session, PROMPT, asked, max_context=room))
    assert len(result.ids) == 10


async def test_two_turns_of_a_chat_send_each_token_once():
    session = LocalSession()
    talk = [{"role": "user", "content": "Hi"}]
    head = ScriptedHead(TOKENIZER.encode("Hello"), after=TOKENIZER.eos_token_id)
    turn = next_turn_ids(TOKENIZER, session.token_ids, talk)
    first = await GenerationResult.collect(run(session, turn.append, GenerationSettings(), head))
    assert turn.keep == 0 and first.text == "Hello"

    talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "More"}]
    turn = next_turn_ids(TOKENIZER, session.token_ids, talk)
    assert turn.keep == session.position
    session.rollback(turn.keep)
    head = ScriptedHead(TOKENIZER.encode("Bye"), after=TOKENIZER.eos_token_id)
    second = await GenerationResult.collect(run(session, turn.append, GenerationSettings(), head))
    assert second.text == "Bye"
    assert TOKENIZER.decode(session.token_ids).endswith("<|im_start|>assistant\nBye")
    assert sum(map(len, session.sent)) == session.position

    talk[0] = {"role": "user", "content": "Ho"}  # an edited chat goes back to the edit
    turn = next_turn_ids(TOKENIZER, session.token_ids, talk)
    assert TOKENIZER.decode(session.token_ids[: turn.keep]) == "<|im_start|>user\nH"


@pytest.mark.parametrize("seed", [None, 5])
async def test_the_rest_of_what_broke_off_is_what_it_would_have_been(seed):
    """Text pieces, tokens and finish; wherever it broke off, also in the midst of a step, and in another process."""
    asked = GenerationSettings(max_new_tokens=24, seed=seed, repetition_penalty=1.3, min_new_tokens=3, stop=("\x07",))
    held, prompt = TOKENIZER.encode("Held before. "), PROMPT
    clock = count()

    def follow(session: LocalSession, unfinished: Unfinished):
        return generate(
            session, LocalHead(), TOKENIZER, prompt, asked, clock=lambda: float(next(clock)), unfinished=unfinished
        )

    async def whole() -> list[tuple[int, str, int, str | None]]:
        session = LocalSession(held)
        stream = follow(session, Unfinished(session.position, prompt, asked))
        return [(token.id, token.text, token.index, token.finish) async for token in stream]

    expected = await whole()
    assert len(expected) == 24
    for after in (0, 1, 2, 11, 23):
        session = LocalSession(held)
        session.fail_at = after
        unfinished, got = Unfinished(session.position, prompt, asked), []
        with pytest.raises(NoRoute):
            async for token in follow(session, unfinished):
                got += [(token.id, token.text, token.index, token.finish)]
        assert len(got) == after and session.position == unfinished.position
        elsewhere = Unfinished(
            unfinished.held, list(prompt), asked, said=list(unfinished.said), state=unfinished.sampler_state()
        )
        for state, place in ((unfinished, session), (elsewhere, LocalSession(session.token_ids))):
            place.fail_at = None
            rest = [(token.id, token.text, token.index, token.finish) async for token in follow(place, state)]
            assert [*got, *rest] == expected
