"""How a prompt is cut for a route."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.driver import LEAST_CHUNK, MOST_CHUNK, MOST_PIPELINED, prefill_chunk


@given(st.integers(1, 100_000), st.integers(1, 40))
def test_chunks_are_of_about_one_size_and_never_too_large(positions, hops):
    chunk = prefill_chunk(positions, hops)
    assert 1 <= chunk <= (MOST_CHUNK if hops == 1 else MOST_PIPELINED)
    count = -(-positions // chunk)
    assert positions - (count - 1) * chunk > chunk - count, "the last one is no small rest"


def test_more_hops_or_a_shorter_prompt_make_smaller_chunks():
    assert prefill_chunk(40, 2) == 40
    assert prefill_chunk(1000, 1) == 500
    assert prefill_chunk(1000, 2) == 200
    assert LEAST_CHUNK <= prefill_chunk(1000, 10) < 100
