"""The benchmark's arithmetic and the shape of what it writes; no process is started."""

from __future__ import annotations

import json
import time
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from bench.__main__ import LONG_PARTS, PARTS, table
from bench.figures import (
    Figure,
    Rounds,
    Run,
    as_json,
    decode_rate,
    first_token_s,
    longest_gap_s,
    take_turns,
    total_rate,
)
from bench.process import smaps_rollup
from bench.prompts import PROMPTS, long_ids
from bench.simulated import SCENARIOS, foreseen


def run(began: float, *times: float) -> Run:
    return Run(began=began, ids=tuple(range(len(times))), times=times)


def test_decode_leaves_the_first_token_out():
    assert decode_rate(run(0.0, 9.0, 9.5, 10.0)) == pytest.approx(2.0)
    assert first_token_s(run(2.0, 9.0, 9.5)) == pytest.approx(7.0)


def test_the_wait_for_the_first_token_is_no_gap():
    assert longest_gap_s(run(0.0, 9.0, 9.5, 11.0, 11.5)) == pytest.approx(1.5)


def test_runs_side_by_side_count_from_the_first_begin_to_the_last_token():
    assert total_rate([run(1.0, 2.0, 3.0), run(0.0, 1.0, 5.0)]) == pytest.approx(4 / 5)


def test_a_run_has_a_time_for_every_token():
    with pytest.raises(ValueError, match="2 tokens with 1 times"):
        Run(began=0.0, ids=(1, 2), times=(1.0,))


def test_both_take_turns_and_neither_is_always_first():
    order: list[str] = []

    def side(name: str):
        return lambda turn: order.append(f"{name}{turn}") or f"{name}{turn}"

    rounds = take_turns(3, side("y"), side("s"))
    assert order == ["y0", "s0", "s1", "y1", "y2", "s2"]
    assert rounds == Rounds(yardstick=("y0", "y1", "y2"), subject=("s0", "s1", "s2"))


def test_the_ratio_is_taken_within_a_round():
    # The machine was half as fast in the last two rounds: the ratio does not see it, two medians would.
    rounds = Rounds(yardstick=(10.0, 4.0, 5.0), subject=(9.0, 4.0, 4.5))
    ratios = rounds.ratios(float)
    assert ratios == pytest.approx([0.9, 1.0, 0.9])
    assert Figure.of_median("decode", "x local", ratios).value == pytest.approx(0.9)


def test_the_json_is_a_list_of_figure_value_unit_runs():
    figures = [
        Figure.of_median("stall", "s", [0.3, 0.1, 0.2], note="for people"),
        Figure.of_sum("equal", "of 3 runs", [True, True, False]),
    ]
    assert json.loads(as_json(figures)) == [
        {"figure": "stall", "value": 0.2, "unit": "s", "runs": [0.3, 0.1, 0.2]},
        {"figure": "equal", "value": 2, "unit": "of 3 runs", "runs": [1, 1, 0]},
    ]


def test_the_table_numbers_its_notes_and_fits_80_columns():
    figures = [
        Figure.of_median("time to first token, 1,000-token prompt, 2 peers, times local", "x local", [1.5, 1.25], "a"),
        Figure.of_median("stall after SIGKILL of the first hop at token 64", "s", [0.3], "b"),
        Figure.of_median("launch to serving, founder, 15 blocks", "s", [3.0], "a"),
    ]
    console = Console(width=80, record=True, file=StringIO())
    console.print(table(figures))
    text = console.export_text().splitlines()
    assert max(len(line) for line in text) <= 80
    lines = [line.split() for line in text]
    assert [line[-1] for line in lines if ".." in line and "highest" not in line] == ["1", "2", "1"]
    assert lines[-2:] == [["1", "a"], ["2", "b"]]


def test_memory_is_read_in_bytes_by_name():
    text = "55d0-7ffd ---p 00000000 00:00 0    [rollup]\nRss:  2048 kB\nPss_Anon:   3 kB\n"
    assert smaps_rollup(text) == {"Rss": 2 << 20, "Pss_Anon": 3 << 10}


def test_no_two_rounds_send_the_same_long_prompt():
    prompts = [[index] * (30 + index) for index in range(8)]
    sent = [tuple(long_ids(prompts, 1000, turn)) for turn in range(6)]
    assert {len(ids) for ids in sent} == {1000}
    assert len({ids[:30] for ids in sent}) == 6


def test_eight_prompts_for_eight_sessions_and_no_part_has_two_names():
    assert len(set(PROMPTS)) == 8
    assert not PARTS.keys() & LONG_PARTS.keys()


def test_a_paced_pass_takes_what_the_scenario_gives_it():
    from bench.paced import Pace, _paced

    def rows(*counts: int):
        return [SimpleNamespace(hidden=SimpleNamespace(shape=(count, 4))) for count in counts]

    pace = Pace(block_s=0.01, prefill_share=0.05, slope=0.1)
    assert pace.pass_s(rows(1)) == pytest.approx(0.01)
    assert pace.pass_s(rows(1, 1, 8)) == pytest.approx(0.012)
    assert pace.pass_s(rows(9)) == pytest.approx(0.01)  # no pass takes less than a step does
    assert pace.pass_s(rows(40, 40)) == pytest.approx(0.04)
    begun = time.perf_counter()
    assert len(list(_paced(iter([None, None]), 0.01, 3))) == 3
    assert time.perf_counter() - begun >= 0.03


def test_the_lab_and_the_simulator_are_told_the_same():
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS) == 4
    for scenario in SCENARIOS:
        assert len(scenario.places) == 1 + scenario.peers and len(scenario.spans) == scenario.peers
        assert foreseen(scenario.but(seconds=4.0)).tokens_per_s > 0
