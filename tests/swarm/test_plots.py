"""What the pictures say, read back from their bars and words; and that the words stay legible."""

from __future__ import annotations

import sys
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.errors import BadInput, StartError
from routing.types import Hop, Route
from swarm import plots
from swarm.healing import Recovery
from swarm.plots import CLIENT_NAME, hop_figure, timeline, token_figure
from swarm.session import HopTrace, StepTrace
from swarm.timeline import token_times

A, B, C = "12D3KooWAbcdefXy3Qz1", "12D3KooWAbcdefPq77Lm", "12D3KooWAbcdefRr5Tt9"
BEFORE = Route((Hop(A, 0, 15), Hop(B, 15, 30)))
AFTER = Route((Hop(A, 0, 10), Hop(C, 10, 30)))
QUEUE_S, COMPUTE_S, NETWORK_S, CLIENT_S = 0.001, 0.018, 0.002, 0.008
HOP_S = QUEUE_S + COMPUTE_S + NETWORK_S
STALL_S = 0.3


def step(at_s: float, route: Route = BEFORE, tokens: int = 1, stall_s: float = 0.0) -> StepTrace:
    """As a session records it: a stall counts as network time of the first hop, for want of a better place."""
    hops = tuple(
        HopTrace(
            hop=hop, queue_s=QUEUE_S, compute_s=tokens * COMPUTE_S, network_s=NETWORK_S + (stall_s if not index else 0)
        )
        for index, hop in enumerate(route)
    )
    return StepTrace(
        at_s=at_s,
        total_s=sum(hop.queue_s + hop.compute_s + hop.network_s for hop in hops),
        tokens=tokens,
        epoch=0 if route == BEFORE else 1,
        hops=hops,
    )


def change(at_s: float, before: Route | None = BEFORE, after: Route = AFTER) -> Recovery:
    return Recovery(at_s=at_s, position=0, reason="connection lost", seconds=0.05, before=before, after=after)


def answer(count: int, killed: int | None = None) -> tuple[list[StepTrace], list[Recovery], float]:
    """A prompt of 40 tokens and its answer of `count` tokens; the peer dies just after token `killed`."""
    traces, recoveries, killed_at = [], [change(99.9, before=None, after=BEFORE)], 0.0
    at_s = 100.0
    for number in range(1, count + 1):
        stalled = killed is not None and number == killed + 1
        if stalled:
            killed_at = at_s - CLIENT_S / 2
            recoveries.append(change(killed_at + 0.001))
        route = BEFORE if killed is None or number <= killed else AFTER
        traces.append(step(at_s, route, 40 if number == 1 else 1, STALL_S if stalled else 0.0))
        at_s += traces[-1].total_s + CLIENT_S
    return traces, recoveries, killed_at


# -- the division of time ----------------------------------------------------------------------------------------


def test_a_token_counts_from_the_end_of_the_one_before():
    traces, recoveries, _ = answer(4)
    prompt, *rest = token_times(traces, recoveries)
    assert prompt.number == 1 and prompt.tokens == 40 and prompt.total_s == pytest.approx(traces[0].total_s)
    for time in rest:
        assert time.total_s == pytest.approx(2 * HOP_S + CLIENT_S)
        assert [seconds for _, seconds in time.hops] == [pytest.approx(HOP_S)] * 2
        assert time.client_s == pytest.approx(CLIENT_S) and time.recovery_s == 0


def test_what_a_change_of_route_took_is_recovery_and_not_network():
    traces, recoveries, _ = answer(8, killed=4)
    times = token_times(traces, recoveries)
    assert [time.number for time in times if time.recovery_s] == [5]
    assert times[4].recovery_s == pytest.approx(STALL_S + 2 * NETWORK_S)
    assert [hop for hop, _ in times[4].hops] == list(AFTER)


@pytest.mark.parametrize("when", ["while the caller was busy", "while the step was on its way"])
def test_a_change_of_route_belongs_to_the_token_it_held_up(when):
    traces, _, _ = answer(5)
    shift = -CLIENT_S / 2 if when == "while the caller was busy" else 0.01
    times = token_times(traces, [change(traces[3].at_s + shift)])
    assert [time.number for time in times if time.recovery_s] == [4]


def test_the_first_route_of_a_session_is_no_recovery():
    traces, _, _ = answer(3)
    assert not any(time.recovery_s for time in token_times(traces, [change(traces[0].at_s + 0.001, before=None)]))


def test_the_time_to_think_before_a_turn_is_nobodys():
    traces = [step(100, tokens=40), step(101), step(500, tokens=12), step(501)]
    assert token_times(traces)[2].total_s == pytest.approx(traces[2].total_s)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_the_parts_add_up(steps):
    traces, recoveries, at_s = [], [], 10.0
    for gap_s, stall_s, disturbed, prompt in steps:
        at_s += gap_s
        traces.append(step(at_s, tokens=5 if prompt else 1, stall_s=stall_s))
        if disturbed:
            recoveries.append(change(at_s + 1e-3))
        at_s += traces[-1].total_s
    for time in token_times(traces, recoveries):
        parts = sum(seconds for _, seconds in time.hops) + time.recovery_s + time.client_s
        assert parts == pytest.approx(time.total_s)
        assert min(time.recovery_s, time.client_s) >= 0


# -- the pictures ------------------------------------------------------------------------------------------------


def series(figure) -> dict[str, list[float]]:
    return {bars.get_label(): [bar.get_height() for bar in bars] for bars in figure.axes[0].containers}


def words(figure) -> list[str]:
    return [text.get_text() for text in visible_texts(figure)]


def visible_texts(figure) -> list:
    """Titles, labels and legends; what stands along the axes places itself."""
    from matplotlib.text import Text

    axes = figure.axes[0]
    ticks = {*axes.get_xticklabels(), *axes.get_yticklabels()}
    return [text for text in figure.findobj(Text) if text.get_text() and text.get_visible() and text not in ticks]


def test_hop_figure_shows_each_hop_by_kind_of_work_and_the_client():
    traces, _, _ = answer(9, killed=5)
    figure = hop_figure(BEFORE, traces)
    axes = figure.axes[0]
    widths = [bar.get_width() for bars in axes.containers for bar in bars]
    hop_ms = [1e3 * COMPUTE_S, 1e3 * QUEUE_S, 1e3 * NETWORK_S]
    assert widths == pytest.approx([*hop_ms, *hop_ms, 1e3 * CLIENT_S])
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "1.  Xy3Qz1, blocks 0:15", "2.  Pq77Lm, blocks 15:30", "client (head, sampling)",
    ]  # fmt: skip
    assert axes.get_xlabel() == "milliseconds"
    assert {"21.0 ms", "8.0 ms", "medians over 4 tokens", "compute", "queue", "network"} <= set(words(figure))


def test_token_figure_stacks_hops_recovery_and_client():
    traces, recoveries, killed_at = answer(9, killed=5)
    figure = token_figure(traces, recoveries, {"peer killed": killed_at})
    shown = series(figure)
    assert list(shown) == [
        "Xy3Qz1, blocks 0:15, then 0:10", "Pq77Lm, blocks 15:30", "Rr5Tt9, blocks 10:30", "recovery",
        "client (head, sampling)",
    ]  # fmt: skip
    hop_ms, work_ms = 1e3 * HOP_S, 1e3 * (QUEUE_S + COMPUTE_S)
    assert shown["Pq77Lm, blocks 15:30"] == pytest.approx([hop_ms] * 4 + [0] * 4)
    assert shown["Rr5Tt9, blocks 10:30"] == pytest.approx([0] * 4 + [work_ms] + [hop_ms] * 3)
    assert shown["recovery"] == pytest.approx([0] * 4 + [1e3 * (STALL_S + 2 * NETWORK_S)] + [0] * 3)
    tops = [bar.get_y() + bar.get_height() for bar in figure.axes[0].containers[-1]]
    assert tops == pytest.approx([1e3 * time.total_s for time in token_times(traces)[1:]])


def test_token_figure_marks_the_moment_and_names_the_new_route():
    traces, recoveries, killed_at = answer(9, killed=5)
    figure = token_figure(traces, recoveries, {"peer killed": killed_at, "screamed": killed_at + 0.002, "late": 1e9})
    axes = figure.axes[0]
    assert [list(line.get_xdata()) for line in axes.lines] == [[5.5, 5.5]]  # before the bar of token 6
    assert axes.get_xlabel() == "token" and axes.get_ylabel() == "milliseconds since the token before"
    said = words(figure)
    assert "peer killed, screamed" in said and "late" not in " ".join(said)
    assert "350 ms\nnew route:\nXy3Qz1, blocks 0:10\nRr5Tt9, blocks 10:30" in said
    assert "Each token: 50.0 ms (median), 350 ms (longest)" in said
    assert "first token after 1,446 ms (prompt of 40 tokens)" in said


def test_an_undisturbed_answer_shows_no_recovery():
    traces, recoveries, _ = answer(5)
    figure = token_figure(traces, recoveries)
    assert "recovery" not in series(figure) and not figure.axes[0].lines
    assert not any("new route" in text for text in words(figure))


def drawn(figure) -> dict[str, list[tuple[float, float]]]:
    """Begin and end of the bars in each line, milliseconds; bars of no length left out."""
    axes = figure.axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for bar in (bar for bars in axes.containers for bar in bars):
        if bar.get_width() > 1e-6:
            line = names[round(bar.get_y() + bar.get_height() / 2)]
            lines[line].append((bar.get_x(), bar.get_x() + bar.get_width()))
    return lines


def test_timeline_draws_when_each_hop_did_what():
    traces, recoveries, _ = answer(9)
    figure = timeline(traces, recoveries, first=3, count=2)
    lines = drawn(figure)
    client, a, b = CLIENT_NAME, "Xy3Qz1, blocks 0:15", "Pq77Lm, blocks 15:30"
    assert list(lines) == [client, a, b]
    assert lines[client] == [pytest.approx((0, 8)), pytest.approx((50, 58))]
    assert lines[a][:3] == [pytest.approx((8, 10)), pytest.approx((10, 11)), pytest.approx((11, 29))]
    # The way from hop to hop took no time that is known; the last hop's 2 ms were the way back.
    assert lines[b][:3] == [pytest.approx((29, 30)), pytest.approx((30, 48)), pytest.approx((48, 50))]
    assert [pytest.approx((x + 50, y + 50)) for x, y in lines[a][:3]] == lines[a][3:]
    assert figure.axes[0].get_xlim() == pytest.approx((0, 100)) and figure.axes[0].get_xlabel() == "milliseconds"
    assert {"Steps 3 to 4: 100.0 ms", "compute", "queue", "network"} <= set(words(figure))


def test_timeline_shows_the_slowest_token_unless_told_otherwise():
    traces, recoveries, _ = answer(30, killed=12)
    figure = timeline(traces, recoveries, count=5)
    assert "Steps 11 to 15: 550 ms" in words(figure) and "the longest: 13 (350 ms)" in words(figure)
    lines = drawn(figure)
    recovered = max(lines[CLIENT_NAME], key=lambda bar: bar[1] - bar[0])
    assert recovered[1] - recovered[0] == pytest.approx(1e3 * (STALL_S + 2 * NETWORK_S))
    assert lines["Rr5Tt9, blocks 10:30"][0][0] > recovered[1] and "recovery" in words(figure)
    assert "Steps 26 to 30: 250 ms" in words(timeline(traces[:30], recoveries, first=26, count=5))
    assert "recovery" not in words(timeline(traces, recoveries, first=26))
    assert "Step 1: 1,446 ms" in words(timeline(answer(1)[0]))


@pytest.mark.parametrize(("first", "count"), [(0, 5), (None, 0), (-3, 5)])
def test_steps_that_cannot_be_counted(first, count):
    with pytest.raises(BadInput, match="counted from 1"):
        timeline(answer(3)[0], first=first, count=count)


@pytest.mark.parametrize(("count", "killed"), [(3, 1), (48, 1), (48, 20), (48, 24), (48, 47), (200, 110)])
def test_words_overlap_neither_each_other_nor_the_edge(count, killed):
    traces, recoveries, killed_at = answer(count, killed)
    marked = token_figure(traces, recoveries, {"peer killed": killed_at})
    for figure in (marked, hop_figure(AFTER, traces), timeline(traces, recoveries)):
        figure.draw_without_rendering()
        boxes = {text.get_text(): text.get_window_extent() for text in visible_texts(figure)}
        for (one, a), (other, b) in combinations(boxes.items(), 2):
            overlap = min(a.x1, b.x1) - max(a.x0, b.x0) > 0 and min(a.y1, b.y1) - max(a.y0, b.y0) > 0
            assert not overlap, (one, other)
        for text, box in boxes.items():
            inside = figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
            assert inside and figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text


def test_a_figure_is_the_value_of_a_cell_by_itself():
    traces, _, _ = answer(3)
    assert token_figure(traces)._repr_png_().startswith(b"\x89PNG")


def test_nothing_to_draw_is_said_so():
    with pytest.raises(BadInput, match="nothing to draw"):
        token_figure([])
    with pytest.raises(BadInput, match="nothing to draw"):
        token_figure(answer(1)[0])  # the prompt alone
    with pytest.raises(BadInput, match="nothing to draw"):
        hop_figure(AFTER, answer(5)[0])
    for traces, first in (([], None), (answer(5)[0], 6)):
        with pytest.raises(BadInput, match="nothing to draw"):
            timeline(traces, first=first)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plots._figure_class.cache_clear()
    with pytest.raises(StartError) as caught:
        token_figure(answer(3)[0])
    assert "swarm-runtime[notebook]" in caught.value.advice
