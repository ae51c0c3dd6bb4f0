"""Peers with quantized weights, alone and beside others: the text is that of one process with the same weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from peer.packing import importances
from routing.constraints import Constraints
from swarm.quantized import INT4, INT8, NF4, NONE, pack, unpack
from tests.whole.inprocess import InProcessSwarm
from tests.whole.reference import Reference
from tests.whole.scenes import PROMPT, Text, running, spare, used

WEIGHTS = {"0:2": INT8, "2:3": INT4, "3:4": NF4, "4:6": NONE}


def with_weights(local: Reference, weights: Mapping[str, str]) -> Reference:
    """The local model with the weights that peers of these spans compute with, unpacked."""
    model = copy.deepcopy(local.model)
    for span, quantization in weights.items():
        if quantization == NONE:
            continue
        start, end = map(int, span.split(":"))
        for layer in model.model.layers[start:end]:
            important = importances(layer.requires_grad_(False))
            for module in layer.modules():
                if isinstance(module, torch.nn.Linear):
                    packed = pack(module.weight, quantization, important.get(module))
                    module.weight = torch.nn.Parameter(unpack(packed, module.in_features, torch.float32), False)
    return Reference.of(model, local.tokenizer)


async def test_peers_of_unlike_quantization_share_a_chain(kernels, tiny: Path, local: Reference) -> None:
    reference = with_weights(local, WEIGHTS)
    ids = local.ids(PROMPT)
    assert reference.greedy(ids, 48) != local.greedy(ids, 48)  # or this would show nothing
    async with running(tiny, []) as (swarm, model):
        for span, quantization in WEIGHTS.items():
            await swarm.add(span, quantization=quantization)
        async with model.session() as session:
            await Text(session, reference).more(48)


@pytest.mark.parametrize("quantization", [INT8, INT4])
async def test_a_lost_peer_is_healed_by_one_of_its_kind(quantization: str, tiny: Path, local: Reference) -> None:
    weights = {"0:3": quantization, "3:6": NONE}
    async with running(tiny, []) as (swarm, model):
        for span in ("0:3", "3:6", "0:3"):
            await swarm.add(span, quantization=weights[span])
        async with model.session() as session:
            text = Text(session, with_weights(local, weights))
            await text.more(10)
            lost = used(swarm, session, 0)
            assert spare(swarm, lost)
            lost.kill()
            await text.more(10)


async def test_a_session_can_ask_for_exact_peers_alone(tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny, ["0:6"]) as swarm:
        await swarm.add("0:6", quantization=INT8)
        for peer, dtype in zip(swarm.peers, ("float32", "float32/int8"), strict=True):
            swarm.tell(peer, dtype=dtype, decode_s=1e-3 if dtype == "float32" else 1e-5)
        for exact, chosen in ((None, swarm.peers[1]), ("float32", swarm.peers[0]), ("float32/int8", swarm.peers[1])):
            constraints = Constraints(exact=exact)
            async with swarm.model(constraints=constraints) as model, model.session() as session:
                async for _ in session.generate(local.ids(PROMPT), max_new_tokens=1, ignore_eos=True):
                    pass
                assert used(swarm, session, 0) is chosen
