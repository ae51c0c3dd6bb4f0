"""Hidden states in 8 bits: what is lost is bounded, what is refused is named, and torch and the kernel agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routing.errors import BadInput, ProtocolError
from swarm import codec, native
from swarm.codec import GROUP, KEPT, TINY, decode_rows, encode_rows, encodings, int8_value_s, loses, row_bytes
from swarm.frames import Codec

VECTORS = json.loads((Path(__file__).parents[2] / "docs" / "wire-vectors.json").read_text())["rows"]
INT8 = Codec.INT8


@pytest.fixture(params=["torch", "kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "kernel" and not native.load():
        pytest.skip("the native kernels are not built here")
    if request.param == "torch":
        monkeypatch.setattr(native, "_loaded", None)
    yield request.param


@st.composite
def some_rows(draw: st.DrawFn, least: float = -38.0) -> torch.Tensor:
    """[n, width] of a magnitude, with some channels far beyond the others, and some values equal."""
    count, width = draw(st.integers(1, 4)), draw(st.integers(1, 200))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = torch.randn(count, width, generator=generator) * 10.0 ** draw(st.floats(least, 30.0))
    outliers = torch.rand(count, width, generator=generator) < draw(st.sampled_from([0.0, 0.02, 0.2]))
    rows = torch.where(outliers, rows * 300, rows)
    equal = torch.rand(count, width, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    return torch.where(equal, rows.abs().amax() * rows.sign(), rows)


def there_and_back(rows: torch.Tensor) -> torch.Tensor:
    return decode_rows(encode_rows(rows, INT8), INT8, rows.shape[1])


@given(some_rows())
def test_the_greatest_channels_are_bf16_and_all_others_within_half_a_step(rows: torch.Tensor) -> None:
    found, kept = there_and_back(rows), min(KEPT, rows.shape[1])
    sizes = rows.abs()
    least = sizes.topk(kept, 1).values[:, -1:]
    as_bf16 = (found == rows.bfloat16().float()) & (sizes >= least)
    assert (as_bf16.sum(1) >= kept).all()
    errors = (found - rows).abs().masked_fill(as_bf16, 0)
    # Of channels as great as the last one kept, some are kept and others are not.
    for error, size in zip(errors.split(GROUP, 1), sizes.minimum(least).split(GROUP, 1), strict=True):
        step = size.amax(1, keepdim=True) / 127
        assert (error <= 0.5 * step * (1 + 2**-7) + 127 * TINY).all()


@given(some_rows(least=-45.0), st.booleans())
def test_torch_and_the_kernel_write_and_read_the_same_bits(rows: torch.Tensor, halved: bool) -> None:
    if not native.load():
        pytest.skip("the native kernels are not built here")
    rows = rows.bfloat16() if halved else rows
    data = codec._pack(rows)
    assert torch.equal(data, codec._pack_in_torch(rows.float()))
    assert torch.equal(codec._unpack(data, rows.shape[1]), codec._unpack_in_torch(data, rows.shape[1]))


@given(some_rows(), st.integers(0, 3))
def test_a_row_is_the_same_bytes_in_whatever_chunk_it_is_sent(rows: torch.Tensor, at: int) -> None:
    """What is sent again after a loss is what was sent before, though it is cut otherwise."""
    at, size = at % len(rows), row_bytes(INT8, rows.shape[1])
    whole = bytes(encode_rows(rows, INT8))
    assert whole[at * size : (at + 1) * size] == bytes(encode_rows(rows[at : at + 1], INT8))


@given(some_rows(), st.data())
def test_damaged_bytes_are_refused_or_read_as_finite_values(rows: torch.Tensor, data: st.DataObject) -> None:
    damaged = bytearray(encode_rows(rows, INT8))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_rows(bytes(damaged), INT8, rows.shape[1])
    except ProtocolError:
        return
    assert found.isfinite().all()


def test_what_is_small_beside_an_outlier_is_not_lost(way: str) -> None:
    """SmolLM2's first token has one channel of 24,891 among others of about 1."""
    rows = torch.randn(1, 576, generator=torch.Generator().manual_seed(0))
    rows[0, 100] = 24_891.0
    found = there_and_back(rows)
    rows[0, 100] = found[0, 100] = 0
    assert (found - rows).abs().max() < 0.02


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), torch.finfo(torch.float32).max])
def test_a_value_that_is_not_finite_is_refused_by_name(value: float, way: str) -> None:
    rows = torch.ones(3, 70)
    rows[1, 69] = value
    with pytest.raises(BadInput, match="row 1 has values that are not finite"):
        encode_rows(rows, INT8)


@pytest.mark.parametrize("vector", [v for v in VECTORS if "error" not in v], ids=lambda v: v["name"])
def test_a_vector_is_written_and_read(vector: dict, way: str) -> None:
    rows = torch.tensor(vector["values"])
    assert bytes(encode_rows(rows, Codec[vector["codec"]])).hex() == vector["hex"]
    found = decode_rows(bytes.fromhex(vector["hex"]), Codec[vector["codec"]], rows.shape[1])
    assert found.tolist() == vector["read as"]


@pytest.mark.parametrize("vector", [v for v in VECTORS if "error" in v], ids=lambda v: v["name"])
def test_a_vector_is_refused(vector: dict, way: str) -> None:
    with pytest.raises(ProtocolError, match=vector["error"]):
        decode_rows(bytes.fromhex(vector["hex"]), Codec[vector["codec"]], vector["hidden"])


def test_rows_that_are_too_wide_for_a_channel_number_are_refused(way: str) -> None:
    with pytest.raises(BadInput, match="65536 are the most"):
        encode_rows(torch.ones(1, 65_537), INT8)


def test_what_a_value_takes_is_measured_with_what_there_is(way: str) -> None:
    before = torch.random.get_rng_state()
    assert 1e-11 < int8_value_s(576) < 1e-4
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's random numbers are the caller's"


def test_what_loses_more_comes_later_and_takes_fewer_bytes() -> None:
    found = encodings(Codec.FP32, 576)
    assert [encoding.number for encoding in found] == [Codec.FP32, Codec.BF16, INT8]
    assert [encoding.row_bytes for encoding in found] == [2304, 1152, 626]
    assert [encoding.error for encoding in found] == sorted(encoding.error for encoding in found)
    assert [encoding.error > 0 for encoding in encodings(Codec.BF16, 576)] == [False, True]
    assert not loses(Codec.FP32, torch.bfloat16) and loses(Codec.BF16, torch.float32)
