"""The table of `swarm generate --trace`, as a person reads it at 80 columns, and in a file without such characters."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from swarm.trace_table import trace_table
from tests.swarm.test_plots import answer
from tests.swarm.test_render import fields, shown


def test_the_median_token_hop_by_hop_and_the_slowest():
    traces, recoveries, _ = answer(24, killed=12)
    text = shown(trace_table(traces, recoveries))
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    rows = fields(text)
    assert text.startswith("One token, hop by hop: medians of 12 tokens on the last route, ms")
    assert [row[:7] for row in rows[3:5]] == [
        ["1", "Xy3Qz1", "0:10", "2.0", "1.0", "18.0", "21.0"],
        ["2", "Rr5Tt9", "10:30", "2.0", "1.0", "18.0", "21.0"],
    ]
    assert rows[5][:2] == ["client", "8.0"]
    assert "The slowest of 23 tokens (the median: 50.0 ms)" in text
    slowest = rows[9:]
    assert len(slowest) == 3 and slowest[0] == [
        "13", "350", "recovery", "304,", "Xy3Qz1", "compute", "18.0,", "Rr5Tt9", "compute", "18.0",
    ]  # fmt: skip


def test_it_says_what_hidden_states_are_written_in():
    traces, recoveries, _ = answer(9)
    ways = [("int8", "fp32"), ("fp32", "fp32")]
    written = []
    for trace in traces:
        pairs = zip(trace.hops, ways, strict=True)
        written.append(replace(trace, hops=tuple(replace(hop, wire_in=a, wire_out=b) for hop, (a, b) in pairs)))
    line = "hidden states go in fp32; to Xy3Qz1 in int8"
    assert line in shown(trace_table(written, recoveries)).splitlines()
    assert "hidden states" not in shown(trace_table(traces, recoveries))


def bars(text: str) -> list[str]:
    """What follows the figures, which end under "ms"."""
    lines = text.splitlines()
    header = next(index for index, line in enumerate(lines) if "compute" in line and " ms " in line)
    end = lines[header].index(" ms ") + 3
    return [line[end:] for line in lines[header + 2 : header + 5]]


@pytest.mark.parametrize("width", [80, 120])
def test_each_bar_begins_where_the_one_before_ends(width):
    traces, recoveries, _ = answer(9)
    first, second, client = (bar.rstrip() for bar in bars(shown(trace_table(traces, recoveries), width=width)))
    begins = [len(bar) - len(bar.lstrip()) for bar in (first, second, client)]
    assert begins[1:] == [len(first), len(second)]
    total = len(client) - begins[0]
    assert len(client.strip()) == pytest.approx(total * 8 / 50, abs=1)  # of 50 ms, 8 are the client's
    assert first.count("█") == pytest.approx(total * 18 / 50, abs=1) == second.count("█")
    assert "─" in first and second.endswith("─") and set(client.strip()) == {"·"}


def test_without_such_characters_it_is_plain():
    traces, recoveries, _ = answer(9)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=out, width=80).print(trace_table(traces, recoveries))
    out.seek(0)
    first, *_ = bars(out.read())
    assert set(first.strip(" |")) == {"-", ":", "#"}  # with the lines that the table has there


def test_a_narrow_terminal_and_a_single_hop_do_not_break_it():
    traces, recoveries, _ = answer(3)
    assert "slowest" in shown(trace_table(traces, recoveries), width=30)
    assert "slowest" not in shown(trace_table(traces, recoveries, slowest=0))


@pytest.mark.parametrize("traces", [[], answer(1)[0]])
def test_without_a_token_after_the_first_it_says_so(traces: Any):
    assert "nothing to compare" in shown(trace_table(traces))
