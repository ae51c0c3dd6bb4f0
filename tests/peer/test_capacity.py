"""What fits this machine: pure arithmetic, with the machine's memory as an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.capacity import (
    DECODE_ROWS,
    LEAST_CACHE_BYTES,
    PREFILL_TOKENS,
    RESERVE_BYTES,
    Memory,
    Speed,
    mean_speed,
    measure,
    proportional,
)
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


@given(most=st.lists(st.integers(0, 60), min_size=1, max_size=6), data=st.data())
def test_blocks_are_divided_by_what_fits(most, data):
    count = data.draw(st.integers(0, sum(most)))
    parts = proportional(count, most)
    assert sum(parts) == count and len(parts) == len(most)
    for part, limit in zip(parts, most, strict=True):
        assert 0 <= part <= limit
        assert abs(part - count * limit / max(1, sum(most))) < 1
    assert proportional(sum(most), most) == tuple(most)


@given(
    free=st.lists(st.integers(0, 64 * GIB), min_size=2, max_size=5),
    limit=st.none() | st.integers(0, 200 * GIB),
    cache=st.none() | st.integers(MIB, 8 * GIB),
    block=st.integers(MIB, 4 * GIB),
    models=st.integers(1, 3),
)
def test_each_device_has_room_for_its_blocks_and_their_part_of_the_cache(free, limit, cache, block, models):
    options = {"limit_bytes": limit, "cache_bytes": cache, "models": models}
    memory = Memory(free_bytes=sum(free), by_device=tuple(free), **options)
    try:
        count = memory.blocks_that_fit(block)
    except NotEnoughMemory as error:
        assert f"on {len(free)} devices together" in str(error)
        # Then one block fits on none of them, or not within the owner's limit.
        whole = 2 * block * models if cache is None else block * models + cache
        assert max(free) - RESERVE_BYTES < whole or (limit is not None and limit < whole)
        return
    assert limit is None or count * block * models * (2 if cache is None else 1) + (cache or 0) <= limit
    shares = memory.shares(count, block)
    assert sum(shares) == count
    memory.check(Span(0, count), block)
    for share, room in zip(shares, free, strict=True):
        assert share * block + share * (cache or 0) // count <= room


def test_devices_that_hold_enough_together_may_hold_too_little_each():
    one, two = Memory(free_bytes=3 * GIB), Memory(free_bytes=3 * GIB, by_device=(3 * GIB // 2, 3 * GIB // 2))
    one.check(Span(0, 1), 2 * GIB)
    with pytest.raises(NotEnoughMemory, match=r"2048 MiB, and these devices have no room for 1; 3072 MiB are free"):
        two.check(Span(0, 1), 2 * GIB)


def test_unlike_devices_get_unlike_shares():
    memory = Memory(free_bytes=32 * GIB, by_device=(24 * GIB, 0, 8 * GIB))
    assert memory.shares(4, GIB) == (3, 0, 1) and memory.shares(1, GIB) == (1, 0, 0)


def test_the_speed_of_a_block_is_the_mean_of_what_a_token_passes():
    fast, slow = (Speed(decode={1: s, 4: 2 * s}, prefill={64: 10 * s}, int8_value_s=1e-9) for s in (0.001, 0.004))
    assert mean_speed([(4, fast)]) == fast
    mean = mean_speed([(20, fast), (10, slow)])
    assert mean.decode == pytest.approx({1: 0.002, 4: 0.004}) and mean.prefill == pytest.approx({64: 0.02})
    assert mean.int8_value_s == 1e-9


def test_speed_is_measured_for_each_batch_size(tmp_path):
    speed = measure(tiny_blocks(tmp_path))
    assert tuple(speed.decode) == DECODE_ROWS and tuple(speed.prefill) == PREFILL_TOKENS
    assert min(*speed.decode.values(), *speed.prefill.values()) > 0
    assert speed.decode_s == speed.decode[1] and speed.prefill_s == speed.prefill[64] / 64
