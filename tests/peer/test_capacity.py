"""What fits this machine: pure arithmetic, with the machine's memory as an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.capacity import DECODE_ROWS, LEAST_CACHE_BYTES, PREFILL_TOKENS, RESERVE_BYTES, Memory, measure
from routing.errors import NotEnoughMemory
from routing.types import Span
from tests.peer.test_measured import tiny_blocks

MIB, GIB = 1 << 20, 1 << 30


@given(
    free=st.integers(0, 64 * GIB),
    limit=st.none() | st.integers(0, 64 * GIB),
    cache=st.none() | st.integers(MIB, 8 * GIB),
    block=st.integers(MIB, 4 * GIB),
)
def test_weights_and_cache_stay_within_the_machine_and_the_limit(free, limit, cache, block):
    memory = Memory(free_bytes=free, limit_bytes=limit, cache_bytes=cache)
    most = min(free - RESERVE_BYTES, free if limit is None else limit)
    each = block if cache is not None else 2 * block
    try:
        count = memory.blocks_that_fit(block)
    except NotEnoughMemory:
        assert each + (cache or 0) > most
        return
    assert count * each + (cache or 0) <= most < (count + 1) * each + (cache or 0)
    memory.check(Span(0, count), block)
    loaded = Memory(free_bytes=free - count * block, limit_bytes=limit, cache_bytes=cache)
    assert loaded.for_cache(count * block) >= LEAST_CACHE_BYTES
    assert limit is None or count * block + loaded.for_cache(count * block) <= limit


def test_an_owners_limit_too_small_for_one_block_is_named():
    memory = Memory(free_bytes=16 * GIB, limit_bytes=100 * MIB)
    with pytest.raises(NotEnoughMemory, match=r"takes 60 MiB; 16384 MiB are free, and --max-memory allows 100 MiB"):
        memory.blocks_that_fit(60 * MIB)


def test_blocks_that_the_owner_chose_are_checked_before_they_are_loaded():
    memory = Memory(free_bytes=2 * GIB, limit_bytes=GIB)
    memory.check(Span(3, 6), 300 * MIB)
    with pytest.raises(NotEnoughMemory, match=r"blocks 3:7 take 1200 MiB"):
        memory.check(Span(3, 7), 300 * MIB)
    with pytest.raises(NotEnoughMemory, match=r"beside 200 MiB of cache"):
        Memory(free_bytes=2 * GIB, limit_bytes=GIB, cache_bytes=200 * MIB).check(Span(3, 6), 300 * MIB)


def test_speed_is_measured_for_each_batch_size(tmp_path):
    speed = measure(tiny_blocks(tmp_path))
    assert tuple(speed.decode) == DECODE_ROWS and tuple(speed.prefill) == PREFILL_TOKENS
    assert min(*speed.decode.values(), *speed.prefill.values()) > 0
    assert speed.decode_s == speed.decode[1] and speed.prefill_s == speed.prefill[64] / 64
