"""Where the time of a session went, as pictures for notebooks.

Owns the drawing of what `timeline.py` reads from `session.traces` and `session.recoveries`, and of a simulation's
report. Plain functions of that data; knows no network and no clock. matplotlib (the extra `notebook`) is imported when
the first figure is drawn. Times are in seconds, pictures show milliseconds.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Any

from routing.errors import BadInput, StartError
from routing.simulation import Report
from routing.types import Hop, PeerId, Route
from swarm.figures import hop_times
from swarm.healing import Recovery
from swarm.render import HopTimes, milliseconds, short_id
from swarm.session import StepTrace
from swarm.timeline import TokenTime, legs, token_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by people with any colour vision (https://jfly.uni-koeln.de/color/).
PEER_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")
RECOVERY_COLOUR = "#D55E00"
CLIENT_COLOUR = "#999999"
CLIENT_NAME = "client (head, sampling)"
NETWORK_ALPHA = 0.4
QUEUE_HATCH = "...."
STYLES: dict[str, dict[str, Any]] = {
    "compute": {},
    "queue": {"hatch": QUEUE_HATCH, "edgecolor": "white"},
    "network": {"alpha": NETWORK_ALPHA},
}


def hop_figure(route: Route, traces: Sequence[StepTrace]) -> Figure:
    """One bar a hop of the route, and one for the client: median milliseconds of one token, by kind of work.

    Raises BadInput if no token came along this route, StartError without matplotlib.
    """
    steps = [step for step in token_times(traces) if step.tokens == 1 and _is_on(step, route)]
    if not steps:
        raise _nothing()
    hops = hop_times(route, traces)
    client_ms = 1e3 * median(step.client_s for step in steps)
    figure, axes = _figure(1.3 + 0.55 * (len(hops) + 1))
    colours = _colours(hop.hop.peer_id for hop in hops)
    for row, hop in enumerate(hops):
        _hop_bar(axes, row, hop, colours[hop.hop.peer_id])
    axes.barh(len(hops), client_ms, height=0.6, color=CLIENT_COLOUR)
    totals = [*(1e3 * (hop.total_s or 0.0) for hop in hops), client_ms]
    for row, total in enumerate(totals):
        axes.annotate(f"{milliseconds(total / 1e3)} ms", (total, row), (4, 0), textcoords="offset points", va="center")
    names = [f"{number}.  {_hop_name(hop.hop)}" for number, hop in enumerate(hops, 1)]
    axes.set_yticks(range(len(totals)), [*names, CLIENT_NAME])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(totals) or 1.0)
    axes.set_xlabel("milliseconds")
    tokens = f"{len(steps)} token{'s' * (len(steps) > 1)}"
    _title(axes, f"One token, hop by hop: {milliseconds(sum(totals) / 1e3)} ms", f"medians over {tokens}")
    figure.legend(handles=_kinds(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def token_figure(
    traces: Sequence[StepTrace], recoveries: Sequence[Recovery] = (), marks: Mapping[str, float] | None = None
) -> Figure:
    """One bar a token: milliseconds since the token before, stacked by hop; changes of route are labelled.

    The first token of a prompt is told in the title only: it takes as long as many others. `marks` are moments to
    point out, on the clock of `time.monotonic`: `{"peer killed": killed_at}`.
    Raises BadInput if no token came after a prompt, StartError without matplotlib.
    """
    everything = token_times(traces, recoveries)
    times = [step for step in everything if step.tokens == 1]
    if not times:
        raise _nothing()
    figure, axes = _figure(4.2)
    _stack(axes, times)
    top = 1e3 * max(step.total_s for step in times)
    axes.set_ylim(0, 1.08 * top)
    axes.set_xlim(times[0].number - 1, times[-1].number + 1)
    axes.set_xlabel("token")
    axes.set_ylabel("milliseconds since the token before")
    routes = {at: recovery.after for recovery in recoveries if (at := _when(times, recovery)) is not None}
    for step, route in routes.items():
        _label_stall(axes, times, step, route)
    _draw_marks(axes, times, marks or {})
    middle = milliseconds(median(step.total_s for step in times))
    longest = milliseconds(max(step.total_s for step in times))
    _title(axes, f"Each token: {middle} ms (median), {longest} ms (longest)", _first_token(everything[0]), pad=20)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def timeline(
    traces: Sequence[StepTrace],
    recoveries: Sequence[Recovery] = (),
    *,
    first: int | None = None,
    count: int = 9,
) -> Figure:
    """When each hop queued and computed, and when data was on its way: `count` steps from number `first` on, the client
    and each hop in a line of its own. Without `first`, the slowest token and those around it.

    Step 1 is the prompt's, which brings the first token. Raises BadInput if there is no such step, StartError without
    matplotlib.
    """
    if count < 1 or (first is not None and first < 1):
        raise BadInput(f"steps are counted from 1, and at least one is drawn: not {count} from {first} on")
    times = token_times(traces, recoveries)
    if first is None:
        slowest = max((step for step in times if step.tokens == 1), key=lambda step: step.total_s, default=None)
        first = 1 if slowest is None else max(1, min(slowest.number - count // 2, len(times) - count + 1))
    shown = times[first - 1 : first - 1 + count]
    if not shown:
        raise _nothing()
    hops = list(dict.fromkeys(hop for step in shown for hop, _ in step.hops))
    figure, axes = _figure(1.6 + 0.45 * (len(hops) + 1))
    begin_s = shown[0].begin_s
    for step in shown:
        _draw_step(axes, traces[step.number - 1], step, hops, begin_s)
    axes.set_yticks(range(len(hops) + 1), [CLIENT_NAME, *map(_hop_name, hops)])
    axes.set_ylim(len(hops) + 0.6, -0.6)
    axes.set_xlim(0, 1e3 * (shown[-1].end_s - begin_s))
    axes.set_xlabel("milliseconds")
    named = f"Steps {first} to {shown[-1].number}" if len(shown) > 1 else f"Step {first}"
    longest = max(shown, key=lambda step: step.total_s)
    detail = f"the longest: {longest.number} ({milliseconds(longest.total_s)} ms)" if len(shown) > 1 else ""
    _title(axes, f"{named}: {milliseconds(shown[-1].end_s - begin_s)} ms", detail)
    kinds = _kinds(recovery=any(step.recovery_s for step in shown))
    figure.legend(handles=kinds, loc="outside lower center", ncols=len(kinds), frameon=False)
    return figure


def simulation(report: Report) -> Figure:
    """Tokens a second over the time of a simulation, and under it the longest stall that ended in each part of it.

    Raises BadInput if no token came, StartError without matplotlib.
    """
    if not any(report.tokens_over_time):
        raise BadInput("no token came in this simulation", advice="Give it more peers, or more time.")
    figure = _figure_class()(figsize=(9.0, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    width = report.seconds / len(report.tokens_over_time)
    begins = [part * width for part in range(len(report.tokens_over_time))]
    stalls_ms = [1e3 * seconds for seconds in report.stalls_over_time]
    for axes, values, colour, label in (
        (above, report.tokens_over_time, PEER_COLOURS[0], "tokens/s"),
        (below, stalls_ms, RECOVERY_COLOUR, "longest stall, ms"),
    ):
        axes.bar(begins, values, width=0.9 * width, align="edge", color=colour, linewidth=0)
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    below.set_xlim(0, report.seconds)
    below.set_xlabel("seconds")
    needless = f"{report.failed_while_covered} of {report.started:,} answers failed while every block had a peer"
    _title(above, f"{report.name}: {report.tokens_per_s:,.1f} tokens/s", needless)
    return figure


# -- reading ---------------------------------------------------------------------------------------------------


def _is_on(step: TokenTime, route: Route) -> bool:
    return tuple(hop for hop, _ in step.hops) == route.hops


def _when(times: Sequence[TokenTime], recovery: Recovery) -> int | None:
    """The index of the token that the recovery held up. None: it was not one of these."""
    return _index_at(times, recovery.at_s) if recovery.before is not None else None


def _index_at(times: Sequence[TokenTime], at_s: float) -> int | None:
    return next((index for index, step in enumerate(times) if step.begin_s < at_s <= step.end_s), None)


def _first_token(first: TokenTime) -> str:
    if first.tokens == 1:
        return ""
    return f"first token after {milliseconds(first.total_s)} ms (prompt of {first.tokens} tokens)"


def _hop_name(hop: Hop) -> str:
    return f"{short_id(hop.peer_id)}, blocks {hop.entry}:{hop.exit}"


def _nothing() -> BadInput:
    return BadInput("there is nothing to draw yet", advice="Generate some tokens in this session first.")


# -- drawing ---------------------------------------------------------------------------------------------------


@cache
def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise StartError(
            "figures need matplotlib", advice="Install it: pip install 'swarm-runtime[notebook]'."
        ) from error

    class ShownFigure(Figure):
        """Shows itself as the value of a notebook's cell, without pyplot and without its global state."""

        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png", dpi=100)
            return out.getvalue()

    return ShownFigure


def _figure(height: float) -> tuple[Figure, Axes]:
    """Inches; the width is that of a notebook's column."""
    figure = _figure_class()(figsize=(9.0, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _title(axes: Axes, text: str, detail: str, pad: float = 6) -> None:
    axes.set_title(text, loc="left", fontweight="bold", fontsize=11, pad=pad)
    axes.set_title(detail, loc="right", fontsize=9, color="#444444", pad=pad)


def _colours(peers: Iterator[PeerId]) -> dict[PeerId, str]:
    """By order of appearance."""
    return {peer: PEER_COLOURS[index % len(PEER_COLOURS)] for index, peer in enumerate(dict.fromkeys(peers))}


def _draw_step(axes: Axes, trace: StepTrace, step: TokenTime, hops: Sequence[Hop], begin_s: float) -> None:
    """The client's line is 0, the hops' follow."""
    colours = _colours(hop.peer_id for hop in hops)

    def bar(row: int, begin: float, end: float, colour: str, **style: Any) -> None:
        left = 1e3 * (begin - begin_s)
        axes.barh(row, 1e3 * (end - begin), left=left, height=0.6, color=colour, linewidth=0, **style)

    parts = legs(trace, disturbed=step.disturbed)
    bar(0, step.begin_s, trace.at_s, CLIENT_COLOUR)
    if step.disturbed:
        bar(0, trace.at_s, parts[0].begin_s if parts else step.end_s, RECOVERY_COLOUR, hatch="////", edgecolor="white")
    for leg in parts:
        bar(1 + hops.index(leg.hop), leg.begin_s, leg.end_s, colours[leg.hop.peer_id], **STYLES[leg.kind])
    axes.axvline(1e3 * (step.end_s - begin_s), color="#dddddd", linewidth=0.8, zorder=0)


def _hop_bar(axes: Axes, row: int, hop: HopTimes, colour: str) -> None:
    left = 0.0
    for kind, seconds in (("compute", hop.compute_s), ("queue", hop.queue_s), ("network", hop.network_s)):
        width = 1e3 * (seconds or 0.0)
        axes.barh(row, width, left=left, height=0.6, color=colour, linewidth=0, **STYLES[kind])
        left += width


def _kinds(recovery: bool = False) -> list:
    from matplotlib.patches import Patch

    kinds = [Patch(facecolor="#444444", linewidth=0, label=kind, **style) for kind, style in STYLES.items()]
    if recovery:
        kinds.append(Patch(facecolor=RECOVERY_COLOUR, hatch="////", edgecolor="white", linewidth=0, label="recovery"))
    return kinds


def _stack(axes: Axes, times: Sequence[TokenTime]) -> None:
    """A series a peer, from the bottom: the hops in order, the recovery, the client."""
    numbers = [step.number for step in times]
    floor = [0.0] * len(times)

    def add(values: list[float], colour: str, label: str, hatch: str = "") -> None:
        heights = [1e3 * value for value in values]
        axes.bar(
            numbers, heights, width=0.8, bottom=floor, color=colour, label=label, hatch=hatch, edgecolor="white",
            linewidth=0,
        )  # fmt: skip
        floor[:] = [low + height for low, height in zip(floor, heights, strict=True)]

    colours = _colours(hop.peer_id for step in times for hop, _ in step.hops)
    for peer_id, colour in colours.items():
        hops = dict.fromkeys(hop for step in times for hop, _ in step.hops if hop.peer_id == peer_id)
        spans = ", then ".join(f"{hop.entry}:{hop.exit}" for hop in hops)
        shares = [sum(seconds for hop, seconds in step.hops if hop.peer_id == peer_id) for step in times]
        add(shares, colour, f"{short_id(peer_id)}, blocks {spans}")
    if any(step.recovery_s for step in times):
        add([step.recovery_s for step in times], RECOVERY_COLOUR, "recovery", hatch="////")
    add([step.client_s for step in times], CLIENT_COLOUR, CLIENT_NAME)


def _label_stall(axes: Axes, times: Sequence[TokenTime], index: int, route: Route) -> None:
    """Beside the top of the bar, on the side with more room."""
    step = times[index]
    text = f"{milliseconds(step.total_s)} ms\nnew route:\n" + "\n".join(_hop_name(hop) for hop in route)
    side = 1 if index < len(times) / 2 else -1
    axes.annotate(
        text, (step.number + 0.5 * side, 1e3 * step.total_s), (6 * side, 0), textcoords="offset points", fontsize=9,
        va="top", ha="left" if side > 0 else "right",
    )  # fmt: skip


def _draw_marks(axes: Axes, times: Sequence[TokenTime], marks: Mapping[str, float]) -> None:
    """A line before the bar of the token that was on its way; labels stand above the axes."""
    labels: dict[int, list[str]] = {}
    for label, at_s in marks.items():
        index = _index_at(times, at_s)
        if index is not None:
            labels.setdefault(times[index].number, []).append(label)
    for number, names in labels.items():
        axes.axvline(number - 0.5, color="black", linestyle="--", linewidth=1.2)
        axes.annotate(
            ", ".join(names), (number - 0.5, 1.0), (0, 3), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", va="bottom", fontsize=9,
        )  # fmt: skip
