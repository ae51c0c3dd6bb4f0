"""A measurement is kept for the setting it was made in, and for no other."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from peer.blocks import Blocks, Loading
from peer.capacity import DECODE_ROWS, PREFILL_TOKENS, Speed
from peer.measured import kept_decode_s, machine_setting, measured, setting_of
from routing.types import Span
from swarm import disk_cache
from swarm.checkpoint import open_checkpoint
from swarm.families import family_of
from tests.full_disk import full_disk
from tests.tiny import make_tiny

SWARM = bytes(range(32))


def tiny_blocks(folder: Path, span: Span = Span(1, 3)) -> Blocks:  # noqa: B008
    checkpoint = open_checkpoint(str(make_tiny("llama", folder / "tiny")))
    return Loading(checkpoint, family_of(checkpoint.config), span, torch.float32).load_all()


class Stopwatch:
    """Each measurement says another speed."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, blocks: Blocks) -> Speed:
        self.runs += 1
        decode, prefill = dict.fromkeys(DECODE_ROWS, 0.001 * self.runs), dict.fromkeys(PREFILL_TOKENS, 0.01)
        return Speed(decode=decode, prefill=prefill, int8_value_s=5e-9)


@pytest.fixture
def blocks(tmp_path: Path) -> Blocks:
    return tiny_blocks(tmp_path)


def test_the_same_setting_is_measured_once(blocks: Blocks, tmp_path: Path) -> None:
    watch, kept = Stopwatch(), tmp_path / "measured"
    first = measured(blocks, setting_of(blocks, SWARM, "float32"), kept, watch)
    assert measured(blocks, setting_of(blocks, SWARM, "float32"), kept, watch) == first
    assert watch.runs == 1


@pytest.mark.parametrize(
    "what",
    ["processor", "threads", "torch", "package", "kernels", "model", "blocks", "hidden", "bytes", "dtype", "device"],
)
def test_whatever_changes_it_is_measured_again(blocks: Blocks, tmp_path: Path, what: str) -> None:
    watch, kept, setting = Stopwatch(), tmp_path / "measured", setting_of(blocks, SWARM, "float32")
    assert what in setting
    measured(blocks, setting, kept, watch)
    value = setting[what]
    changed = setting | {what: f"{value}x" if isinstance(value, str) else not value if value is True else value + 1}
    assert measured(blocks, changed, kept, watch).decode[1] == 0.002
    assert measured(blocks, setting, kept, watch).decode[1] == 0.001  # the old one still counts


def test_another_model_dtype_or_number_of_threads_is_another_setting(blocks: Blocks) -> None:
    setting, threads = setting_of(blocks, SWARM, "float32"), torch.get_num_threads()
    assert setting_of(blocks, bytes(32), "float32") != setting != setting_of(blocks, SWARM, "float32/int8")
    torch.set_num_threads(threads + 1)
    try:
        assert setting_of(blocks, SWARM, "float32") != setting
    finally:
        torch.set_num_threads(threads)


def test_before_there_are_blocks_what_was_kept_for_any_number_of_them_tells(blocks: Blocks, tmp_path: Path) -> None:
    watch, kept = Stopwatch(), tmp_path / "measured"
    setting, before = setting_of(blocks, SWARM, "float32"), machine_setting(torch.device("cpu"), SWARM, "float32")
    assert kept_decode_s(before, kept) == 0.0
    for age_s, count in ((100, 2), (50, 7), (200, 5)):
        measured(blocks, setting | {"blocks": count}, kept, watch)
        [new] = [path for path in kept.iterdir() if f'"blocks":{count},' in path.read_text()]
        os.utime(new, (1e9 - age_s, 1e9 - age_s))
    assert watch.runs == 3 and kept_decode_s(before, kept) == 0.002, "the newest"
    (kept / "damaged.json").write_bytes(b"{")
    assert kept_decode_s(before, kept) == 0.002
    for other in (bytes(32), "float32"), (SWARM, "float32/int8"), (SWARM, "bfloat16"):
        assert kept_decode_s(machine_setting(torch.device("cpu"), *other), kept) == 0.0


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"\xff" + data,
        lambda data: data.replace(b"0.001", b"-1.0"),
        lambda data: data.replace(b'"16"', b'"17"'),
        lambda data: data.replace(b"float32", b"float64"),
    ],
)
def test_a_damaged_measurement_is_told_and_made_again(blocks, tmp_path, caplog, damage) -> None:
    watch, kept, setting = Stopwatch(), tmp_path / "measured", setting_of(blocks, SWARM, "float32")
    measured(blocks, setting, kept, watch)
    [file] = kept.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert measured(blocks, setting, kept, watch).decode[1] == 0.002
    assert f"{file} is damaged" in caplog.text
    assert measured(blocks, setting, kept, watch).decode[1] == 0.002


def test_where_nothing_can_be_written_it_goes_on_and_says_so_once(blocks, tmp_path, caplog) -> None:
    watch, setting = Stopwatch(), setting_of(blocks, SWARM, "float32")
    in_the_way = tmp_path / "a file"
    in_the_way.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            measured(blocks, setting, in_the_way / "measured", watch)
    assert watch.runs == 2 and caplog.text.count("going on without") == 1


def test_a_disk_that_fills_up_keeps_the_old_file_whole(tmp_path) -> None:
    path = tmp_path / "kept" / "file"
    assert disk_cache.keep(path, b"old")
    with full_disk():
        assert not disk_cache.keep(path, b"new")
    assert path.read_bytes() == b"old" and list(path.parent.iterdir()) == [path]
