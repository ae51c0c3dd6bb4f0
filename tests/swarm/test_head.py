"""The client's part of the model gives what the local model gives, in fp32 and bf16, one row or many."""

from __future__ import annotations

import pytest
import torch

from routing.errors import BadInput, PromptTooLong
from swarm.checkpoint import open_checkpoint
from swarm.families import family_of
from swarm.head import Head
from tests.tiny import FAMILIES, VOCAB, make_tiny

TOKENS = torch.arange(3, 43)
POSITIONS = torch.arange(40)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    return open_checkpoint(str(make_tiny(request.param, tmp_path_factory.mktemp(request.param))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_and_logits_are_the_local_models(kernels, checkpoint, dtype):
    head = Head.load(checkpoint, family_of(checkpoint.config), dtype)
    model = checkpoint.reference_model(dtype)
    with torch.no_grad():
        states = model(TOKENS[None], output_hidden_states=True)
        before_norm = _input_of_norm(model, family_of(checkpoint.config).norm, TOKENS)
    assert torch.equal(head.embed(TOKENS, POSITIONS), states.hidden_states[0][0])
    error = (head.logits(before_norm) - states.logits[0].float()).abs().max()
    assert error <= (1e-5 if dtype == torch.float32 else 2e-2) * states.logits.abs().max()


def _input_of_norm(model, norm, tokens):
    seen = []
    module = model.base_model.get_submodule(norm)
    hook = module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0].clone()))
    model(tokens[None])
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_independent(checkpoint, dtype):
    head = Head.load(checkpoint, family_of(checkpoint.config), dtype)
    hidden = torch.randn(40, head.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    together = head.logits(hidden)
    assert together.shape == (40, VOCAB)
    assert together.dtype == torch.float32 and together.is_contiguous()
    for rows in (hidden[:1], hidden[:5], hidden[7:8]):
        alone, start = head.logits(rows), 0 if rows.data_ptr() == hidden.data_ptr() else 7
        assert torch.allclose(alone, together[start : start + len(rows)], rtol=2e-2, atol=2e-2 * together.abs().max())


def test_logits_may_be_changed_in_place_even_of_states_made_in_inference_mode(checkpoint):
    head = Head.load(checkpoint, family_of(checkpoint.config), torch.float32)
    with torch.inference_mode():
        hidden = torch.randn(1, head.hidden_size)
    logits = head.logits(hidden)
    logits[0, 3] = float("-inf")  # samplers do this


def test_only_the_clients_tensors_are_read(checkpoint, monkeypatch):
    asked: list[str] = []
    load = type(checkpoint).load
    monkeypatch.setattr(
        type(checkpoint), "load", lambda self, names, dtype=None: load(self, _note(asked, names), dtype)
    )
    family = family_of(checkpoint.config)
    head = Head.load(checkpoint, family, torch.float32)
    assert sorted(asked) == sorted(family.client_tensors(checkpoint.config, checkpoint.tensor_names()).values())
    assert head.nbytes == sum(checkpoint.nbytes(name) for name in asked)
    assert (head.weight is head.embedding) == checkpoint.config.tie_word_embeddings


def _note(asked, names):
    names = list(names)
    asked += names
    return names


def test_a_token_that_is_not_in_the_vocabulary_is_refused(checkpoint):
    head = Head.load(checkpoint, family_of(checkpoint.config), torch.float32)
    for wrong in (VOCAB, -1):
        with pytest.raises(BadInput, match="vocabulary"):
            head.embed(torch.tensor([1, wrong]), torch.tensor([0, 1]))


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_end(family, tmp_path):
    checkpoint = open_checkpoint(str(make_tiny(family, tmp_path)))
    head = Head.load(checkpoint, family_of(checkpoint.config), torch.float32)
    head.embed(torch.tensor([1]), torch.tensor([511]))
    with pytest.raises(PromptTooLong, match="512"):
        head.embed(torch.tensor([1]), torch.tensor([512]))
