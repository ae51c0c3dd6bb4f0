"""The chain of highest throughput against all chains, each priced here in another way."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from routing.throughput import END, Pipeline


def random_pipeline(seed: int) -> tuple[Pipeline, dict, dict]:
    rng = random.Random(seed)
    peers, blocks = rng.randint(1, 5), rng.randint(1, 6)
    spans = [(0, blocks)]
    for _ in range(peers - 1):
        start = rng.randint(0, blocks - 1)
        spans.append((start, rng.randint(start + 1, blocks)))
    pairs = list(itertools.permutations([END, *range(peers)], 2))
    transfers = {pair: rng.choice([0.0, 1.0, 2.0, rng.random()]) for pair in pairs}
    links = {pair: rng.choice([0.1, 1.0, rng.random()]) for pair in pairs}
    pipeline = Pipeline(
        servers=[[p for p, (start, end) in enumerate(spans) if start <= block < end] for block in range(blocks)],
        stage_block=[rng.choice([0.3, 0.5, rng.random()]) for _ in range(peers)],
        stage_toll=[rng.choice([0.0, 0.2, rng.random()]) for _ in range(peers)],
        transfer=lambda a, b: transfers[a, b],
        block_cost=[rng.choice([0.1, rng.random()]) for _ in range(peers)],
        toll=[rng.choice([0.0, rng.random()]) for _ in range(peers)],
        link=lambda a, b: links[a, b],
    )
    return pipeline, transfers, links


def key_of(pipeline: Pipeline, transfers: dict, links: dict, stays: list[tuple[int, int]]) -> tuple[float, float]:
    """`stays`: (peer, blocks)."""
    ends = list(itertools.pairwise([END, *(peer for peer, _ in stays), END]))
    busy: dict[int, float] = defaultdict(float)
    cost = sum(links[way] for way in ends)
    for peer, blocks in stays:
        busy[peer] += pipeline.stage_toll[peer] + blocks * pipeline.stage_block[peer]
        cost += pipeline.toll[peer] + blocks * pipeline.block_cost[peer]
    return round(max(*busy.values(), *(transfers[way] for way in ends)), 9), cost


@settings(max_examples=500)
@example(18385)  # takes dozens of parts
@given(st.integers(0, 2**32))
def test_the_slowest_stage_is_the_least_of_all_chains_and_then_the_cost(seed: int) -> None:
    pipeline, transfers, links = random_pipeline(seed)
    keys = []
    for chain in itertools.product(*pipeline.servers):
        stays = [(peer, len(list(run))) for peer, run in itertools.groupby(chain)]
        keys.append(key_of(pipeline, transfers, links, stays))
    path = pipeline.run()
    assert [start for _, start, _ in path] == [0, *(end for _, _, end in path[:-1])]
    assert path[-1][2] == len(pipeline.servers)
    assert all(peer in pipeline.servers[block] for peer, start, end in path for block in range(start, end))
    found = key_of(pipeline, transfers, links, [(peer, end - start) for peer, start, end in path])
    assert found[0] == pytest.approx(pipeline.slowest(path), abs=1e-8)
    assert found == pytest.approx(min(keys), abs=1e-8)


def test_a_peer_that_a_chain_comes_to_twice_has_the_work_of_both() -> None:
    def pipeline(servers: list[list[int]]) -> Pipeline:
        return Pipeline(
            servers=servers, stage_block=[1.0, 0.1, 1.0], stage_toll=[0.0] * 3, transfer=lambda a, b: 0.1,
            block_cost=[1.0] * 3, toll=[0.0] * 3, link=lambda a, b: 1.0,
        )  # fmt: skip

    alone = pipeline([[0], [0], [0, 1], [0, 1], [0], [0]])
    assert alone.run() == [(0, 0, 2), (1, 2, 4), (0, 4, 6)] and alone.slowest(alone.run()) == 4.0
    shared = pipeline([[0], [0], [0, 1], [0, 1], [0, 2], [0, 2]])
    assert shared.run() == [(0, 0, 2), (1, 2, 4), (2, 4, 6)] and shared.slowest(shared.run()) == 2.0
