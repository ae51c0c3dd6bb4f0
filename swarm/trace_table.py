"""A session's trace as a table for the terminal: the median token hop by hop, with bars, and the slowest tokens.

Owns how it looks; the figures are those of `timeline.py` and `figures.py`. Reads well at 80 columns, and as plain text
in a file. Knows no network and no clock. Times come in seconds and are shown in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.jupyter import JupyterMixin
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from routing.types import Route
from swarm.figures import hop_times
from swarm.render import HopTimes, Parts, milliseconds, short_id, wire_lines
from swarm.timeline import TokenTime, token_times, way_back

if TYPE_CHECKING:
    from swarm.healing import Recovery
    from swarm.session import HopTrace, StepTrace

SLOWEST = 3
MOST_PARTS = 3  # of a slow token
MOST_BAR = 60  # characters
GAP = 3  # between the figures and the bars
STYLES = {"network": "dim", "queue": "yellow", "compute": "cyan", "client": "dim"}
MARKS = {"network": "─", "queue": "▒", "compute": "█", "client": "·"}
PLAIN_MARKS = {"network": "-", "queue": ":", "compute": "#", "client": "."}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. `parts` are the kinds of its bar and their seconds, in order."""

    cells: tuple[str, ...]
    parts: tuple[tuple[str, float], ...]

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.parts)


@dataclass(frozen=True, slots=True)
class Waterfall(JupyterMixin):
    """Each line's bar begins where that of the line before ends."""

    rows: tuple[Row, ...]
    title: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        marks = PLAIN_MARKS if options.ascii_only else MARKS
        figures = self._figures()
        for row in self.rows:
            figures.add_row(*row.cells)
        taken = Measurement.get(console, options.update(max_width=1000), figures).maximum
        legend = _legend(marks)
        width = min(MOST_BAR, max(legend.cell_len, options.max_width - taken - GAP))
        scale, at = width / (sum(row.seconds for row in self.rows) or 1.0), 0.0
        table = self._figures()
        table.add_column(legend, no_wrap=True)
        for row in self.rows:
            table.add_row(*row.cells, _bar(row, at, scale, marks))
            at += row.seconds
        yield table

    def _figures(self) -> Table:
        table = _table(self.title)
        for header in ("hop", "blocks"):
            table.add_column(header, no_wrap=True)
        for header in ("net", "queue", "compute", "ms"):
            table.add_column(header, justify="right", no_wrap=True)
        return table


def trace_table(
    traces: Sequence[StepTrace], recoveries: Sequence[Recovery] = (), *, slowest: int = SLOWEST
) -> RenderableType:
    """`slowest`: how many of the slowest tokens are told. The first token of a prompt is none of them: it takes as long
    as many others."""
    times = [time for time in token_times(traces, recoveries) if time.tokens == 1]
    if not times:
        return Text("No token came after the first one: there is nothing to compare.")
    route = Route(tuple(hop for hop, _ in times[-1].hops))
    usual = [time for time in times if tuple(hop for hop, _ in time.hops) == route.hops]
    client_s = median(time.client_s for time in usual)
    hops = hop_times(route, traces)
    rows = [*_hop_rows(hops), Row(("client", *[""] * 4, milliseconds(client_s)), (("client", client_s),))]
    title = f"One token, hop by hop: medians of {_tokens(len(usual))} on the last route, ms"
    worst = sorted(times, key=lambda time: time.total_s, reverse=True)[:slowest]
    middle = milliseconds(median(time.total_s for time in times))
    slow = _table(f"The slowest of {_tokens(len(times))} (the median: {middle} ms)")
    for header in ("token", "ms"):
        slow.add_column(header, justify="right", no_wrap=True)
    slow.add_column("most of it, ms")
    for time in worst:
        where = ", ".join(f"{name} {milliseconds(s)}" for name, s in _largest(traces[time.number - 1], time))
        slow.add_row(str(time.number), milliseconds(time.total_s), Text(where))
    parts: list[RenderableType] = [Waterfall(tuple(rows), title), *wire_lines(hops)]
    return Parts(*parts, slow) if worst else Parts(*parts)


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"


def _table(title: str) -> Table:
    text = Text(title, style="bold")
    return Table(box=box.SIMPLE_HEAD, title=text, title_justify="left", padding=(0, 1, 0, 0))


def _hop_rows(hops: Sequence[HopTimes]) -> Iterator[Row]:
    back = way_back([times.network_s or 0.0 for times in hops])
    for number, times in enumerate(hops, 1):
        returns = back if number == len(hops) else 0.0
        network, queue, compute = times.network_s or 0.0, times.queue_s or 0.0, times.compute_s or 0.0
        figures = map(milliseconds, (network, queue, compute, times.total_s))
        parts = (("network", network - returns), ("queue", queue), ("compute", compute), ("network", returns))
        blocks = f"{times.hop.entry}:{times.hop.exit}"
        yield Row((f"{number} {short_id(times.hop.peer_id)}", blocks, *figures), parts)


def _bar(row: Row, at: float, scale: float, marks: dict[str, str]) -> Text:
    bar = Text(" " * round(at * scale), no_wrap=True)
    for kind, seconds in row.parts:
        bar.append(marks[kind] * (round((at + seconds) * scale) - round(at * scale)), style=STYLES[kind])
        at += seconds
    return bar


def _legend(marks: dict[str, str]) -> Text:
    kinds = [Text(f"{marks[kind]} {kind}", style=STYLES[kind]) for kind in ("network", "queue", "compute")]
    return Text(" ").join(kinds)


def _largest(trace: StepTrace, time: TokenTime) -> list[tuple[str, float]]:
    parts = [("recovery", time.recovery_s), ("client", time.client_s)]
    for hop in trace.hops:
        parts += _parts_of(hop, disturbed=time.disturbed)
    return sorted((part for part in parts if part[1] > 0), key=lambda part: part[1], reverse=True)[:MOST_PARTS]


def _parts_of(hop: HopTrace, *, disturbed: bool) -> list[tuple[str, float]]:
    name = short_id(hop.hop.peer_id)
    network = 0.0 if disturbed else hop.network_s
    return [(f"{name} network", network), (f"{name} queue", hop.queue_s), (f"{name} compute", hop.compute_s)]
