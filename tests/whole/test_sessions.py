"""The programmer's door on a whole swarm: settings, texts, chats, sessions, dtypes, and the blocking twin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from routing.errors import BadInput, ModelError, NoRoute, PromptTooLong, TimedOut
from swarm.frames import FrameType
from swarm.generation import GenerationResult
from swarm.model import SwarmModel
from swarm.sync import SwarmModel as BlockingModel
from tests.tiny import LONGROPE, make_tiny
from tests.whole.inprocess import InProcessModel, InProcessSwarm
from tests.whole.reference import Reference
from tests.whole.stand_ins import Host, until

PROMPT = "Say something long: "
SPANS = ["0:3", "3:6"]


@asynccontextmanager
async def running(folder: Path, spans: list[str] = SPANS, **options: Any) -> AsyncIterator[tuple[Any, InProcessModel]]:
    async with InProcessSwarm(folder, spans) as swarm, swarm.model(**options) as model:
        yield swarm, model
        await swarm.all_closed()


async def result(stream: Any) -> GenerationResult:
    return await GenerationResult.collect(stream)


async def greedy(session: Any, prompt: Any, count: int) -> list[int]:
    return [token.id async for token in session.generate(prompt, max_new_tokens=count, ignore_eos=True)]


# -- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": 8},
        {"top_p": 0.7, "top_k": 0},
        {"min_p": 0.05, "repetition_penalty": 1.2},
    ],
)
async def test_sampling_with_a_seed_is_that_of_transformers(
    settings: dict[str, Any], tiny: Path, local: Reference
) -> None:
    ids = local.ids(PROMPT)
    torch.manual_seed(11)
    expected = local.generate(ids, do_sample=True, max_new_tokens=40, eos_token_id=None, **settings)
    async with running(tiny) as (_, model):
        got = await result(model.generate(ids, seed=11, max_new_tokens=40, ignore_eos=True, **settings))
        assert list(got.ids) == expected and got.finish == "length"
        again = await result(model.generate(ids, seed=12, max_new_tokens=40, ignore_eos=True, **settings))
        assert again.ids != got.ids


async def test_the_end_of_text_ends_it(tiny: Path, local: Reference) -> None:
    """Somewhere in the text the local model would stop, if that token were its end."""
    ids = local.ids(PROMPT)
    expected = local.greedy(ids, 40)
    eos = expected[20]
    expected = expected[: expected.index(eos) + 1]
    async with running(tiny) as (_, model):
        got = await result(model.generate(ids, max_new_tokens=40, eos_token_ids=(eos,)))
        assert list(got.ids) == expected and got.finish == "eos"


async def test_a_stop_string_over_several_tokens(tiny: Path, local: Reference) -> None:
    ids = local.ids(PROMPT)
    text = local.tokenizer.decode([*ids, *local.greedy(ids, 60)], skip_special_tokens=True)[len(PROMPT) :]
    stop = next(text[at : at + 3] for at in range(8, 50) if "�" not in text[at : at + 3])
    async with running(tiny) as (_, model):
        got = await result(model.generate(PROMPT, max_new_tokens=60, stop=stop, ignore_eos=True))
        assert got.finish == "stop" and got.text == text[: text.index(stop)]
        assert 8 < len(got.ids) < 60


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": 0}, "do_sample=False"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": ("",)}, "stop"),
        ({"temprature": 1.0}, "temprature"),
    ],
)
async def test_wrong_settings_are_named_before_anything_is_sent(
    settings: dict[str, Any], says: str, tiny: Path
) -> None:
    async with running(tiny) as (swarm, model):
        with pytest.raises(BadInput) as caught:
            await result(model.generate(PROMPT, **settings))
        assert says in str(caught.value) + caught.value.advice
        with pytest.raises(BadInput):
            await model.generate_batch([PROMPT, PROMPT], **settings)
        assert not any(peer.tap.seen for peer in swarm.peers)


@pytest.mark.parametrize("prompt", ["", [], [-1], [10**6], [{"role": "user"}], "x" * 600])
async def test_a_wrong_prompt_is_named_before_anything_is_sent(prompt: Any, tiny: Path, local: Reference) -> None:
    async with running(tiny) as (swarm, model), model.session() as session:
        with pytest.raises(PromptTooLong if len(prompt) == 600 else BadInput):
            await result(session.generate(prompt, max_new_tokens=4))
        assert not any(peer.tap.seen for peer in swarm.peers)
        local.check(local.ids(PROMPT), await greedy(session, PROMPT, 4), 4)  # and it can be used still


async def test_the_whole_context_can_be_used_and_not_one_token_more(tiny: Path, local: Reference) -> None:
    ids = [7 + at % 100 for at in range(500)]
    async with running(tiny) as (_, model):
        assert model.max_context == 512
        with pytest.raises(PromptTooLong):
            await result(model.generate(ids, max_new_tokens=13, ignore_eos=True))
        local.check(ids, [t.id async for t in model.generate(ids, max_new_tokens=12, ignore_eos=True)], 12)


# -- several texts, several turns ------------------------------------------------------------------------------


async def test_a_batch_of_unequal_lengths(tiny: Path, local: Reference) -> None:
    prompts = ["a", PROMPT * 9, "Two words"]
    async with running(tiny) as (_, model):
        results = await model.generate_batch(prompts, max_new_tokens=30, ignore_eos=True)
        for prompt, got in zip(prompts, results, strict=True):
            local.check(local.ids(prompt), got.ids, 30)


async def test_a_batch_that_fails_fails_with_the_error_itself(tiny: Path) -> None:
    async with running(tiny, ["0:3"]) as (_, model):
        with pytest.raises(NoRoute):
            await model.generate_batch(["a", "b"], max_new_tokens=3)
        with pytest.raises(BadInput):
            await model.generate_batch([])


async def test_the_next_turn_of_a_chat_sends_only_what_is_new(tiny: Path, local: Reference) -> None:
    system, questions = "Be brief.", ["Hello?", "And then?", "Really?"]
    async with running(tiny) as (swarm, model), model.chat(system) as chat:
        first = swarm.by_span("0:3")
        messages = [{"role": "system", "content": system}]
        for question in questions:
            messages.append({"role": "user", "content": question})
            ids = local.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            held, before = chat.session.token_ids, first.positions(FrameType.STEP)
            answer = [token async for token in chat.send(question, max_new_tokens=12, ignore_eos=True)]
            sent = first.positions(FrameType.STEP) - before
            local.check(ids, [token.id for token in answer], 12)
            common = next((i for i, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), len(held))
            assert sent == len(ids) - common + 11
            messages.append({"role": "assistant", "content": "".join(token.text for token in answer)})
            assert chat.messages == messages
        assert common > 60  # all of the first turns, at least up to the last answer
        assert len(chat.session.recoveries) == 1 and first.positions(FrameType.FILL) == 0


async def test_a_turn_that_failed_was_never_said(tiny: Path, local: Reference) -> None:
    async with running(tiny) as (_, model), model.chat() as chat:
        answer = [t async for t in chat.send("Hello?", max_new_tokens=5, ignore_eos=True)]
        said = list(chat.messages)
        with pytest.raises(PromptTooLong):
            _ = [t async for t in chat.send("y" * 600, max_new_tokens=5)]
        with pytest.raises(BadInput):
            _ = [t async for t in chat.send("Hm?", max_new_tokens=-5)]
        assert chat.messages == said and answer
        # An answer that is broken off stays as far as it came.
        async for token in chat.send("Go on", max_new_tokens=50, ignore_eos=True):
            broken = token.text
            break
        await until_messages(chat, 4)
        assert chat.messages[-1] == {"role": "assistant", "content": broken}
        ids = local.tokenizer.apply_chat_template(
            [*chat.messages, {"role": "user", "content": "More"}], add_generation_prompt=True, return_dict=False
        )
        local.check(ids, [t.id async for t in chat.send("More", max_new_tokens=8, ignore_eos=True)], 8)


async def until_messages(chat: Any, count: int) -> None:
    """An abandoned generator is closed by the loop, soon."""
    await until(lambda: len(chat.messages) == count)


async def test_going_back_and_editing(tiny: Path, local: Reference) -> None:
    ids, other = local.ids(PROMPT), local.ids("something else")
    async with running(tiny) as (_, model), model.session() as session:
        tokens = await greedy(session, ids, 10)
        assert session.token_ids == ids + tokens[:-1]
        session.rollback(len(ids) + 4)
        local.check([*ids, *tokens[:4], *other], await greedy(session, other, 10), 10)
        session.rollback(5)
        local.check([*ids[:5], *other], await greedy(session, other, 10), 10)
        session.rollback(0)
        local.check(other, await greedy(session, other, 10), 10)
        for wrong in (-1, 1000):
            with pytest.raises(BadInput):
                session.rollback(wrong)
        assert len(session.recoveries) == 1


@pytest.mark.parametrize("after", [1, 3])
async def test_an_abandoned_generation_leaves_a_session_that_goes_on(after: int, tiny: Path, local: Reference) -> None:
    ids, more = local.ids(PROMPT), local.ids(" and so on")
    async with running(tiny) as (_, model), model.session() as session:
        tokens: list[int] = []
        async for token in session.generate(ids, max_new_tokens=40, ignore_eos=True):
            tokens.append(token.id)
            if len(tokens) == after:
                break
        assert session.token_ids == ids + tokens[:-1]
        local.check([*ids, *tokens, *more], await greedy(session, [tokens[-1], *more], 10), 10)


@pytest.mark.parametrize("turns", [0, 4, 9, 20])
async def test_a_cancelled_step_counts_as_a_whole_or_not_at_all(turns: int, tiny: Path, local: Reference) -> None:
    ids = local.ids(PROMPT)
    async with running(tiny) as (_, model), model.session() as session:
        tokens = await greedy(session, ids, 3)
        task = asyncio.ensure_future(greedy(session, tokens[-1:], 30))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        held = session.token_ids
        assert held[: len(ids) + 2] == ids + tokens[:2]
        come = held[len(ids) :]
        assert come == local.greedy(ids, len(come))
        known = local.greedy(ids, len(come) + 1)
        local.check([*ids, *known], await greedy(session, known[-1:], 6), 6)


async def test_a_session_takes_one_generation_at_a_time(tiny: Path) -> None:
    async with running(tiny) as (_, model), model.session() as session:
        stream = session.generate(PROMPT, max_new_tokens=5, ignore_eos=True)
        await anext(stream)
        pending = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(BadInput, match="one step at a time"):
            await greedy(session, "x", 1)
        await pending
        await stream.aclose()
    with pytest.raises(BadInput, match="closed"):
        await greedy(session, "x", 1)


async def test_a_deadline_of_the_caller(tiny: Path, local: Reference) -> None:
    ids = local.ids(PROMPT)
    async with running(tiny) as (swarm, model), model.session() as session:
        tokens = await greedy(session, ids, 4)
        swarm.peers[1].freeze()
        with pytest.raises(TimedOut, match=r"0\.3 s"):
            _ = [t async for t in session.generate(tokens[-1:], max_new_tokens=9, ignore_eos=True, timeout_s=0.3)]
        assert session.token_ids == ids + tokens[:-1]
        swarm.peers[1].thaw()
        local.check([*ids, *tokens], await greedy(session, tokens[-1:], 9), 9)
        with pytest.raises(TimedOut):
            _ = [t async for t in model.generate(ids, max_new_tokens=9, timeout_s=0)]


# -- opening ---------------------------------------------------------------------------------------------------


async def test_a_model_without_a_tokenizer_leaves_nothing(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "bare", layers=2)
    async with InProcessSwarm(folder, ["0:2"]) as swarm:
        tasks = asyncio.all_tasks()
        model = swarm.model()
        with pytest.raises(ModelError):
            await model.__aenter__()
        assert asyncio.all_tasks() == tasks
        assert not model.client._endpoint._peers


async def test_status_shows_peers_and_coverage(tiny: Path) -> None:
    async with running(tiny, ["0:3", "3:6", "2:6"]) as (swarm, model):
        status = await model.status()
        assert status.coverage == (1, 1, 2, 2, 2, 2) and status.uncovered == ()
        assert {str(peer.record.span) for peer in status.peers} == {"0:3", "3:6", "2:6"}
        assert all(peer.reachable and peer.rtt_s < 1 and not peer.banned for peer in status.peers)
        await asyncio.to_thread(swarm.by_span("2:6").kill)
        (dead,) = [peer for peer in (await model.status()).peers if not peer.reachable]
        assert str(dead.record.span) == "2:6" and dead.banned


# -- bf16 ------------------------------------------------------------------------------------------------------


async def teacher_forced(model: InProcessModel, ids: list[int]) -> torch.Tensor:
    """Logits of every position, fp32 [len(ids), vocab]: a prefill of half, then token by token."""
    async with model.session() as session:
        half, steps = len(ids) // 2, session._session
        parts = (ids[:half], *([token] for token in ids[half:]))
        return torch.stack([await model.client.scorer.logits(await steps.step(part)) for part in parts])


@pytest.mark.parametrize(("dtype", "wire"), [("bfloat16", "exact"), ("bfloat16", "float32"), ("float32", "bfloat16")])
async def test_bf16_is_as_near_to_fp32_as_the_local_bf16_model(
    dtype: str, wire: str, tiny: Path, local: Reference
) -> None:
    """bf16 texts may differ; logits may not, beyond a tolerance: the swarm's are no farther from the fp32 model's
    than 1.25 times the local bf16 model's (root of the mean square, over 40 positions)."""
    ids = (local.ids(PROMPT) + local.greedy(local.ids(PROMPT), 60))[:80]
    exact = local.logits(ids)[39:]
    halved = Reference(tiny, torch.bfloat16).logits(ids)[39:]
    async with InProcessSwarm(tiny, SPANS, dtype=getattr(torch, dtype)) as swarm:
        async with swarm.model(wire=wire) as model:
            got = await teacher_forced(model, ids)
        await swarm.all_closed()
    scale = exact.std()
    local_error = ((halved - exact).square().mean().sqrt() / scale).item()
    error = ((got - exact).square().mean().sqrt() / scale).item()
    between = ((got - halved).square().mean().sqrt() / scale).item()
    print(f"{dtype}, wire {wire}: {error:.4f} from fp32, the local bf16 model {local_error:.4f}; {between:.4f} apart")
    assert error < 1.25 * local_error and between < 2 * local_error
    assert error > 1e-5  # bf16 was used at all


async def test_fp32_over_the_wire_is_exact_to_the_last_digits(tiny: Path, local: Reference) -> None:
    ids = local.ids(PROMPT) + local.greedy(local.ids(PROMPT), 40)
    async with running(tiny) as (_, model):
        got = await teacher_forced(model, ids)
    expected = local.logits(ids)[len(ids) // 2 - 1 :]
    assert (got - expected).abs().max() < 1e-3


# -- the blocking twin -------------------------------------------------------------------------------------------


@contextmanager
def blocking(folder: Path, spans: list[str] = SPANS) -> Iterator[tuple[InProcessSwarm, BlockingModel]]:
    """A swarm on a thread of its own, and a model that blocks."""
    host = Host("swarm")
    swarm = InProcessSwarm(folder, spans)
    host.run(swarm.__aenter__())
    try:
        with BlockingModel(swarm.model()) as model:
            yield swarm, model
            host.run(swarm.all_closed())
    finally:
        host.run(swarm.__aexit__())
        host.stop()


def test_the_blocking_model_does_the_same(tiny: Path, local: Reference) -> None:
    ids = local.ids(PROMPT)
    with blocking(tiny) as (_, model):
        local.check(ids, [t.id for t in model.generate(PROMPT, max_new_tokens=8, ignore_eos=True)], 8)
        results = model.generate_batch([PROMPT, "b"], max_new_tokens=8, ignore_eos=True)
        local.check(local.ids("b"), results[1].ids, 8)
        assert model.encode(PROMPT) == ids and model.status().uncovered == () and model.max_context == 512
        with model.session() as session:
            for count, token in enumerate(session.generate(ids, max_new_tokens=40, ignore_eos=True)):
                last = token.id
                if count == 4:
                    break
            assert session.token_ids == [*ids, *local.greedy(ids, 4)]
            got = [t.id for t in session.generate([last], max_new_tokens=3, ignore_eos=True)]
            local.check([*ids, *local.greedy(ids, 5)], got, 3)
            session.rollback(len(ids) - 1)
            local.check(ids, [t.id for t in session.generate(ids[-1:], max_new_tokens=3, ignore_eos=True)], 3)
            assert len(session.recoveries) == 1 and session.traces
        with model.chat() as chat:
            answer = [t.text for t in chat.send("Hello?", max_new_tokens=5, ignore_eos=True)]
            assert chat.messages[-1]["content"] == "".join(answer)
        with pytest.raises(BadInput):
            list(model.generate(PROMPT, max_new_tokens=0))


async def test_the_blocking_model_works_inside_a_running_loop(tiny: Path, local: Reference) -> None:
    """As in a notebook's cell: this function runs on an event loop that goes on."""
    with blocking(tiny) as (_, model):
        tokens = []
        for token in model.generate(PROMPT, max_new_tokens=8, ignore_eos=True):
            tokens.append(token.id)
            await asyncio.sleep(0)
        local.check(local.ids(PROMPT), tokens, 8)


def test_a_generator_that_outlives_the_blocking_model(tiny: Path) -> None:
    with blocking(tiny) as (_, model):
        stream = model.generate(PROMPT, max_new_tokens=50, ignore_eos=True)
        next(stream)
        session = model.session()
        other = session.generate(PROMPT, max_new_tokens=50, ignore_eos=True)
        next(other)
        stream.close()
        session.__exit__()
        third = model.generate(PROMPT, max_new_tokens=50, ignore_eos=True)
    other.close()  # nothing is left to close, and nobody is in its way
    assert list(other) == []
    with pytest.raises(BadInput, match="closed"):
        next(third)


def test_an_asynchronous_and_a_blocking_model_have_the_same_doors() -> None:
    public = {name for name in vars(SwarmModel) if not name.startswith("_")}
    assert public <= {name for name in vars(BlockingModel) if not name.startswith("_")}


async def test_a_sequence_that_outgrows_the_short_regime_of_longrope(tmp_path: Path) -> None:
    """All of it is computed anew in the long one, as transformers' generate does, and in the short one after going
    back. Prompts on both sides, texts that cross, a peer lost on the way."""
    local = Reference(make_tiny("phi3", tmp_path, tokenizer=True, **LONGROPE))
    limit = LONGROPE["original_max_position_embeddings"]
    async with running(tmp_path, ["0:2", "2:4", "0:2"]) as (swarm, model):
        for length in (limit - 10, limit, limit + 1):
            ids = local.ids("abcdefghijklmnopqrstuvwxyz"[:length])
            async with model.session() as session:
                assert await greedy(session, ids, 20) == local.greedy(ids, 20)
                session.rollback(5)
                assert await greedy(session, [7], 4) == local.greedy([*ids[:5], 7], 4)
        ids = local.ids("a shorter one")
        wanted = local.greedy(ids, 30)
        async with model.session() as session:
            assert await greedy(session, ids, 20) == wanted[:20]
            await asyncio.to_thread(swarm.by_id(session.route[0].peer_id).kill)
            assert await greedy(session, wanted[19:20], 10) == wanted[20:]
