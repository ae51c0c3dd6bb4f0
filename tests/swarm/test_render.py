"""Rendered to strings: what a person reads at 80 columns, in a file and on a terminal."""

from __future__ import annotations

import io
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from routing.errors import BadInput, NoRoute
from routing.types import Hop, PeerRecord, PeerState, Span
from swarm.render import (
    DemoSummary,
    HopTimes,
    PeerRow,
    coverage_bar,
    demo_table,
    error_panel,
    milliseconds,
    route_table,
    status_table,
)

A, B, C = "12D3KooWAbcdefXy3Qz1", "12D3KooWAbcdefPq77Lm", "12D3KooWAbcdefRr5Tt9"


def shown(renderable: RenderableType, *, width: int = 80, terminal: bool = False) -> str:
    out = io.StringIO()
    kind = {"force_terminal": True, "color_system": "standard"} if terminal else {"force_terminal": False}
    Console(file=out, width=width, legacy_windows=False, **kind).print(renderable)
    return out.getvalue()


def fields(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def test_status_has_a_line_a_peer_in_order_of_blocks():
    rows = [
        PeerRow(record=PeerRecord(peer_id=C, span=Span(112, 126), cache_total=131072), banned=True),
        PeerRow(
            record=PeerRecord(peer_id=B, span=Span(15, 30), state=PeerState.DRAINING, decode_s=0.0005),
            rtt_s=0.00042, decode_s=0.0021, prefill_s=0.00005,
        ),
        PeerRow(
            record=PeerRecord(
                peer_id=A, span=Span(0, 15), decode_s=0.00084, queue_s=0.004,
                cache_free=12288, cache_total=16384,
            ),
            rtt_s=0.1234,
        ),
    ]  # fmt: skip
    text = shown(status_table(rows))
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert fields(text)[3:] == [
        ["Xy3Qz1", "0:15", "serving", "0.84", "-", "4.0", "12,288", "(75%)", "123"],
        ["Pq77Lm", "15:30", "draining", "2.1", "0.05", "0", "-", "0.42"],  # measured before claimed
        ["Rr5Tt9", "112:126", "avoided", "-", "-", "0", "0", "(0%)", "-"],
    ]
    assert "\x1b" not in text and "\x1b" in shown(status_table(rows), terminal=True)
    assert "No peer" in shown(status_table([]))


def test_coverage_names_what_is_missing():
    text = shown(coverage_bar([1] * 15 + [2] * 8 + [0] * 4 + [9, 10] + [0]))
    assert text.splitlines() == [
        " 0  1111111111 1111122222 222----9+-",
        "Nobody serves 23:27, 29:30 (5 of 30 blocks): text cannot be generated.",
    ]
    assert "only one peer serves 0:2, 3:4." in shown(coverage_bar([1, 1, 2, 1]))
    assert "All 3 blocks are served, each by 2 peers or more." in shown(coverage_bar([2, 3, 2]))


@given(st.lists(st.integers(0, 12), min_size=1, max_size=256), st.integers(20, 120))
def test_coverage_fits_and_has_a_cell_for_each_block(counts, width):
    lines = shown(coverage_bar(counts), width=width).splitlines()
    bar = list(takewhile(lambda line: not line.startswith(("Nobody", "All")), lines))
    assert all(len(line) <= width for line in lines)
    cells = "".join("".join(line.split()[1:]) for line in bar)
    assert cells == "".join("-" if n == 0 else str(n) if n < 10 else "+" for n in counts)
    starts = [int(line.split()[0]) for line in bar]
    assert starts[0] == 0 and all(start % 10 == 0 for start in starts)


def test_route_adds_up_and_keeps_the_unknown_apart():
    hops = (
        HopTimes(hop=Hop(A, 0, 15), network_s=0.0205, queue_s=0.0002, compute_s=0.0131),
        HopTimes(hop=Hop(B, 15, 30), network_s=0.001, compute_s=0.024),
    )
    text = shown(route_table(hops, "now"))
    assert text.startswith("now")
    rows = fields(text)
    assert rows[3:] == [
        ["1", "Xy3Qz1", "0:15", "20.5", "0.20", "13.1", "33.8"],
        ["2", "Pq77Lm", "15:30", "1.0", "-", "24.0", "25.0"],
        ["all", "21.5", "0.20", "37.1", "58.8"],
    ]
    assert "all" not in shown(route_table(hops[:1]))
    assert fields(shown(route_table([HopTimes(hop=Hop(A, 0, 3))])))[-1][3:] == ["-"] * 4


@pytest.mark.parametrize(
    ("codecs", "line"),
    [
        (("fp32", "fp32", "fp32"), "hidden states go in fp32"),
        (("int8", "fp32", "fp32"), "hidden states go in fp32; to Xy3Qz1 in int8"),
        (("int8", "int8", "fp32"), "hidden states go in int8; back in fp32"),
        (("int8", "bf16", "fp32"), "hidden states go in int8; to Pq77Lm in bf16; back in fp32"),
    ],
)
def test_a_route_says_what_hidden_states_are_written_in(codecs, line):
    hops = [
        HopTimes(hop=Hop(peer, at, at + 15), network_s=0.02, wire_in=codecs[index], wire_out=codecs[index + 1])
        for index, (peer, at) in enumerate(((A, 0), (B, 15)))
    ]
    assert shown(route_table(hops)).splitlines()[-1] == line
    assert "hidden states" not in shown(route_table([HopTimes(hop=Hop(A, 0, 15))])) + shown(route_table([]))


@pytest.mark.parametrize(("identical", "word"), [(True, "yes"), (False, "NO"), (None, "not compared")])
def test_demo_shows_both_routes_and_the_figures(identical, word):
    before = (HopTimes(hop=Hop(A, 0, 15), compute_s=0.02), HopTimes(hop=Hop(B, 15, 30), compute_s=0.03))
    after = (
        before[0],
        HopTimes(hop=Hop(C, 15, 22), compute_s=0.01),
        HopTimes(hop=Hop(A, 22, 30), compute_s=0.02),
    )
    text = shown(
        demo_table(
            DemoSummary(
                event=f"peer {B[-6:]} [red] was killed at token 40", before=before, after=after,
                tokens_per_s_before=17.24, tokens_per_s_after=15.0, stall_s=0.212, identical=identical,
            )
        )
    )  # fmt: skip
    assert text.startswith("peer Pq77Lm [red] was killed at token 40")  # not markup
    rows = fields(text)
    assert ["1", "Xy3Qz1", "0:15", "20.0", "Xy3Qz1", "0:15", "20.0"] in rows
    assert ["2", "Pq77Lm", "15:30", "30.0", "Rr5Tt9*", "15:22", "10.0"] in rows
    assert ["3", "Xy3Qz1*", "22:30", "20.0"] in rows
    assert ["all", "50.0", "all", "50.0"] in rows
    for line in ("before       17.2", "after        15.0", "stall         212 ms", f"local model   {word}"):
        assert line in text


def test_errors_are_plain_in_a_file_and_framed_on_a_terminal():
    error = NoRoute("nobody serves [15:22] [/red]", blocks=[15])
    text = shown(error_panel(error), width=120)
    assert text.splitlines() == ["error: nobody serves [15:22] [/red]", NoRoute.advice]
    assert shown(error_panel(BadInput("no"))) == "error: no\n"
    framed = shown(error_panel(error), terminal=True)
    assert "╭" in framed and "[15:22] [/red]" in framed and "--wait" in framed


def test_milliseconds_keep_about_three_digits():
    times = (None, 0, 0.00042, 0.0081, 0.0995, 0.14, 12)
    assert [milliseconds(t) for t in times] == ["-", "0.00", "0.42", "8.1", "99.5", "140", "12,000"]
