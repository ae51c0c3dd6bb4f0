"""The packed attention against a plain one written out row by row: windows, caps, sinks, scales, groups, chunks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from peer.attention import NAME, Pack, Segment, packed_attention, register
from peer.cache import CacheShape, SeatCache
from swarm import native

WIDTH = 16  # the least that the native kernel takes
PASSES = [(5, 0, 1), (1, 7, 1), (1, 1, 6), (4, 1, 0), (1, 1, 1)]  # rows of each of three seats


pytestmark = pytest.mark.usefixtures("one_thread")


def plain(query, keys, values, position, scaling, window, softcap, sink):
    """One row of one head in float64: query [d], keys and values [S, d]. A sink is one more key, of value zero."""
    first = 0 if window is None else max(0, position - window + 1)
    scores = keys[first : position + 1].double() @ query.double() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    values = values[first : position + 1].double()
    if sink is not None:
        scores = torch.cat([scores, sink.double()[None]])
        values = torch.cat([values, torch.zeros_like(values[:1])])
    return scores.softmax(0) @ values


def run_passes(heads, kv_heads, dtype, passes=PASSES, **options):
    """Yields (ours, plain), each [rows, heads, d], for each pass. Layer 5 of seats that begin there."""
    make = torch.Generator().manual_seed(3)
    shape = CacheShape(kv_heads=kv_heads, head_dim=WIDTH, hidden=4, dtype=dtype, device=torch.device("cpu"))
    seats = [SeatCache(5, 6, shape) for _ in range(3)]
    past: list[tuple[Any, Any]] = [(torch.zeros(kv_heads, 0, WIDTH),) * 2 for _ in seats]
    module: Any = SimpleNamespace(layer_idx=5)
    scaling = options.pop("scaling", WIDTH**-0.5)
    sinks = options.get("s_aux")
    for counts in passes:
        total = sum(counts)
        # As the library hands them over: rows outermost in memory.
        query = 2 * torch.randn(1, total, heads, WIDTH, generator=make)
        key, value = (torch.randn(1, total, kv_heads, WIDTH, generator=make) for _ in range(2))
        query, key, value = (tensor.to(dtype).transpose(1, 2) for tensor in (query, key, value))
        segments, expected, offset = [], [], 0
        for index, count in enumerate(counts):
            if not count:
                continue
            seat, rows = seats[index], slice(offset, offset + count)
            seat.reserve(seat.position + count)
            segments.append(Segment(seat, offset, count, seat.position))
            keys, values = (
                torch.cat([old, new[0, :, rows].float()], 1) for old, new in zip(past[index], (key, value), strict=True)
            )
            past[index] = keys, values
            for row, head in itertools.product(range(count), range(heads)):
                group = head // (heads // kv_heads)
                expected.append(
                    plain(
                        query[0, head, offset + row].float(),
                        keys[group],
                        values[group],
                        seat.position + row,
                        scaling,
                        options.get("sliding_window"),
                        options.get("softcap"),
                        None if sinks is None else sinks[head],
                    )
                )
            offset += count
        out, nothing = packed_attention(
            module, query, key, value, None, pack=Pack(segments), scaling=scaling, **options
        )
        assert nothing is None and out.shape == (1, total, heads, WIDTH) and out.dtype == dtype
        yield out[0].double(), torch.stack(expected).view(total, heads, WIDTH)
        for segment in segments:
            segment.seat.position = segment.end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_every_row_attends_to_its_own_session_alone(kernels, heads, kv_heads, window, softcap, dtype):
    tolerance = 2e-6 if dtype == torch.float32 else 3e-2
    for ours, expected in run_passes(heads, kv_heads, dtype, sliding_window=window, softcap=softcap, scaling=0.3):
        assert (ours - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_a_sink_of_each_head_takes_its_share(kernels, heads, kv_heads, window, dtype):
    """Also where our own kernels are there, which know no sinks."""
    tolerance = 2e-6 if dtype == torch.float32 else 3e-2
    sinks = torch.linspace(-2, 3, heads).to(dtype)
    for ours, expected in run_passes(heads, kv_heads, dtype, sliding_window=window, s_aux=sinks):
        assert (ours - expected).abs().max() <= tolerance * expected.abs().max()


def test_the_check_is_sharp(kernels):
    """A window off by one, another scale, no cap, or no sinks are each seen."""
    for wrong in ({"sliding_window": 4}, {"scaling": 0.33}, {"softcap": None}, {"s_aux": None}):
        right = {"sliding_window": 3, "softcap": 2.0, "scaling": 0.3, "s_aux": torch.linspace(-2, 3, 6)}
        pairs = zip(
            run_passes(6, 2, torch.float32, **right), run_passes(6, 2, torch.float32, **{**right, **wrong}), strict=True
        )
        assert max((ours - others).abs().max() for (ours, _), (others, _) in pairs) > 1e-2


def test_the_new_keys_and_values_lie_behind_those_held(kernels):
    shape = CacheShape(kv_heads=2, head_dim=WIDTH, hidden=4, dtype=torch.float32, device=torch.device("cpu"))
    seat = SeatCache(0, 2, shape)
    module: Any = SimpleNamespace(layer_idx=1)
    rows = []
    for count in (3, 1, 2):
        query = torch.randn(1, 4, count, WIDTH)
        key, value = torch.randn(1, 2, count, WIDTH), torch.randn(1, 2, count, WIDTH)
        seat.reserve(seat.position + count)
        seat.extents(0)[0].fill_(7)
        packed_attention(module, query, key, value, None, pack=Pack([Segment(seat, 0, count, seat.position)]))
        seat.position += count
        rows.append((key[0], value[0]))
    for held, new in zip(seat.extents(1), zip(*rows, strict=True), strict=True):
        assert torch.equal(held[0, :, :6], torch.cat(new, 1))
    assert (seat.extents(0)[0] == 7).all(), "another layer's keys were touched"


def test_rows_of_decoding_sessions_go_to_the_native_kernel_together(native_kernels, monkeypatch):
    taken = []

    class Counting:
        def attend_rows(self, query, *rest):
            taken.append(query.shape[2])
            return native_kernels.attend_rows(query, *rest)

    monkeypatch.setattr(native, "_loaded", Counting())
    for _ in run_passes(6, 2, torch.float32):
        pass
    assert taken == [1, 1, 1, 2, 1, 3], "one call for each run of rows that follow one another"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_not_a_number_stays_one(kernels, dtype):
    """A bad pass is found by looking at its output, so no kernel may swallow one."""
    shape = CacheShape(kv_heads=1, head_dim=WIDTH, hidden=4, dtype=dtype, device=torch.device("cpu"))
    for poisoned in range(3):
        seat = SeatCache(0, 1, shape)
        seat.reserve(20)
        for held in seat.extents(0):
            held.normal_()
        seat.position = 19
        rows = [torch.randn(1, 1, 1, WIDTH).to(dtype) for _ in range(3)]
        rows[poisoned][..., 3] = float("nan")
        pack = Pack([Segment(seat, 0, 1, 19)])
        out, _ = packed_attention(SimpleNamespace(layer_idx=0), *rows, None, pack=pack)  # type: ignore[arg-type]
        assert torch.isnan(out[..., 3]).all()


def test_a_keyword_that_it_does_not_know_is_an_error():
    """A family that adds position biases must not run as if it had none."""
    module: Any = SimpleNamespace(layer_idx=0)
    rows = torch.zeros(1, 1, 1, WIDTH)
    biases: Any = {"position_bias": torch.zeros(1)}
    with pytest.raises(TypeError, match="position_bias"):
        packed_attention(module, rows, rows, rows, None, pack=Pack([]), **biases)


def test_the_library_finds_it_by_name():
    register()
    assert AttentionInterface()[NAME] is packed_attention
