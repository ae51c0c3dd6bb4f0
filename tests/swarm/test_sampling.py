"""The sampler against `transformers.generate` itself, and the settings' edge."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from routing.errors import BadInput
from swarm.sampling import GenerationSettings, Sampler, TokenBuffer, best

VOCAB = 300
PROMPT = [5, 17, 17, 99, 250, 3]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, eos_token_id=None,
        bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def scores_of(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].float()


def ours(model: LlamaForCausalLM, settings: GenerationSettings) -> list[int]:
    sampler = Sampler(settings, prompt_length=len(PROMPT))
    context = TokenBuffer(PROMPT)
    ids = list(PROMPT)
    while len(ids) < len(PROMPT) + settings.max_new_tokens:
        token = sampler.next(context.view(), scores_of(model, ids))
        ids.append(token)
        context.append(token)
        if token in settings.eos_token_ids and not settings.ignore_eos:
            break
    return ids[len(PROMPT) :]


def theirs(model: LlamaForCausalLM, settings: GenerationSettings) -> list[int]:
    asked = {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if (value := getattr(settings, name)) is not None
    }
    eos = None if settings.ignore_eos else list(settings.eos_token_ids) or None
    if settings.seed is not None:
        torch.manual_seed(settings.seed)
    # use_cache=False: the logits are then those of the same one-shot forward pass, bit for bit.
    out = model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long), use_cache=False,
        do_sample=settings.samples, max_new_tokens=settings.max_new_tokens,
        min_new_tokens=settings.min_new_tokens, eos_token_id=eos, pad_token_id=0, **asked,
    )  # fmt: skip
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"repetition_penalty": 1.7},
        {"seed": 1},
        {"seed": 2, "temperature": 0.3},
        {"seed": 3, "top_k": 0},
        {"seed": 4, "top_k": 5, "temperature": 2.5},
        {"seed": 5, "top_p": 0.6, "top_k": 0},
        {"seed": 6, "min_p": 0.1, "temperature": 1.5},
        {"seed": 7, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
        {"seed": 8, "repetition_penalty": 2.0, "temperature": 3.0},
        {"seed": 9, "temperature": 5.0, "eos_token_ids": tuple(range(100, 200)), "min_new_tokens": 7},
        {"eos_token_ids": tuple(range(0, 300, 2)), "min_new_tokens": 3},
        {"eos_token_ids": tuple(range(0, 300, 2)), "min_new_tokens": 3, "ignore_eos": True},
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(model, asked):
    settings = GenerationSettings(max_new_tokens=20, **asked)
    expected = theirs(model, settings)
    assert ours(model, settings) == expected
    assert len(set(expected)) > 1  # the case says something


def test_eos_is_put_off_by_min_new_tokens(model):
    eos = tuple(range(0, 300, 2))
    hasty = ours(model, GenerationSettings(max_new_tokens=20, eos_token_ids=eos))
    patient = ours(model, GenerationSettings(max_new_tokens=20, eos_token_ids=eos, min_new_tokens=9))
    assert len(hasty) < 9 <= len(patient)
    assert not set(patient[:9]) & set(eos)


def test_seeds_differ_and_no_seed_differs_each_time(model):
    def run(seed: int | None) -> list[int]:
        return ours(model, GenerationSettings(max_new_tokens=12, seed=seed, temperature=4.0, top_k=0))

    assert run(1) == run(1) != run(2)
    assert run(None) != run(None)


def test_state_rewinds_the_draws():
    logits = torch.zeros(VOCAB)
    sampler = Sampler(GenerationSettings(seed=3, top_k=0))
    first = [sampler.next(None, logits) for _ in range(3)]
    state = sampler.state()
    rest = [sampler.next(None, logits) for _ in range(6)]
    sampler.restore(state)
    assert [sampler.next(None, logits) for _ in range(6)] == rest

    resumed = Sampler(GenerationSettings(seed=99, top_k=0))  # another process, the state came from a file
    resumed.restore(bytes(state))
    assert [resumed.next(None, logits) for _ in range(6)] == rest != first


def test_state_of_other_settings_is_refused():
    greedy, drawing = Sampler(GenerationSettings()), Sampler(GenerationSettings(seed=1))
    assert greedy.state() == b""
    greedy.restore(b"")
    for sampler, state in ((greedy, drawing.state()), (drawing, b""), (drawing, b"short")):
        with pytest.raises(BadInput, match="state"):
            sampler.restore(state)


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, float("-inf")]), min_size=1, max_size=200))
def test_best_is_argmax_and_the_first_of_equals(values):
    logits = torch.tensor(values)
    assert best(logits) == values.index(max(values)) == int(logits.argmax())


def test_the_processors_leave_the_logits_alone():
    logits = torch.randn(VOCAB)
    copy = logits.clone()
    settings = GenerationSettings(seed=1, top_p=0.5, min_p=0.1, repetition_penalty=1.5, min_new_tokens=2,
                                  eos_token_ids=(4,))  # fmt: skip
    Sampler(settings).next(torch.tensor([1, 2]), logits)
    assert torch.equal(logits, copy)


@given(st.lists(st.integers(0, 1000)), st.lists(st.one_of(st.integers(0, 1000), st.none()), max_size=600))
def test_token_buffer_is_a_list(start, operations):
    buffer, expected = TokenBuffer(start), list(start)
    for token in operations:
        if token is None:
            expected = expected[: len(expected) // 2]
            buffer.truncate(len(expected))
        else:
            buffer.append(token)
            expected.append(token)
        assert len(buffer) == len(expected)
    assert buffer.view().tolist() == expected


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ("",)}, "stop"),
        ({"stop": (3,)}, "stop"),
        ({"stop": 3}, "stop"),
        ({"eos_token_ids": (-2,)}, "eos_token_ids"),
        ({"eos_token_ids": "x"}, "eos_token_ids"),
        ({"do_sample": "yes"}, "do_sample"),
    ],
    ids=str,
)
def test_nonsense_is_named(asked, word):
    with pytest.raises(BadInput, match=word):
        GenerationSettings(**asked)


def test_zero_temperature_gets_advice():
    with pytest.raises(BadInput) as caught:
        GenerationSettings(temperature=0.0)
    assert "do_sample=False" in caught.value.advice


def test_sampling_is_inferred():
    assert not GenerationSettings().samples
    assert not GenerationSettings(repetition_penalty=1.2, stop=("x",)).samples
    for asked in ({"temperature": 1.0}, {"top_k": 0}, {"top_p": 0.9}, {"min_p": 0.1}, {"seed": 0}):
        assert GenerationSettings(**asked).samples
        assert not GenerationSettings(do_sample=False, **asked).samples


def test_single_values_become_tuples():
    settings = GenerationSettings(stop="END", eos_token_ids=7)
    assert settings.stop == ("END",) and settings.eos_token_ids == (7,)
    assert GenerationSettings(stop=["a", "b"]).stop == ("a", "b")


def test_model_defaults_fill_what_is_unset():
    config = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, eos_token_id=[7, 8]
    )
    greedy = GenerationSettings().with_model_defaults(config)
    assert not greedy.samples and greedy.eos_token_ids == (7, 8) and greedy.repetition_penalty == 1.1
    drawn = GenerationSettings(temperature=2.0, eos_token_ids=(1,)).with_model_defaults(config)
    assert drawn == GenerationSettings(
        do_sample=True, temperature=2.0, top_p=0.9, top_k=20, repetition_penalty=1.1, eos_token_ids=(1,)
    )
    assert GenerationSettings().with_model_defaults(GenerationConfig()).eos_token_ids == ()
    assert dataclasses.replace(drawn, seed=4).seed == 4
