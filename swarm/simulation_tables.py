"""How the report of a simulation looks in a terminal or a notebook: figures, and tokens a second and stalls over time.

Pure, like `render.py`: a report in, a renderable out. Times are shown in milliseconds, or in seconds where it says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from routing.simulation import Planning, Report
from swarm.render import Parts, milliseconds

LEVELS = "▁▂▃▄▅▆▇█"


def simulation_tables(report: Report) -> RenderableType:
    """Everything about one simulation, in 80 columns."""
    parts: list[RenderableType] = [_figures(report), *_drawings(report)]
    if report.growth:
        parts.append(_growth(report.growth))
    return Parts(*parts, verdict(report))


def verdict(report: Report) -> Text:
    if report.failed_while_covered:
        what = f"{report.failed_while_covered} answers failed while every block had a peer."
        return Text(what, style="bold red")
    return Text("No answer failed while every block had a peer.", style="green")


def sparkline(values: Sequence[float]) -> str:
    """One cell a value, as high as its share of the greatest; a space for nothing."""
    top = max(values, default=0.0)
    if top <= 0:
        return " " * len(values)
    return "".join(" " if value <= 0 else LEVELS[min(7, int(8 * value / top))] for value in values)


def _figures(report: Report) -> Table:
    title = f"{report.name}, seed {report.seed}: {_count(report.peers, 'peer')}, {_count(report.clients, 'client')}, "
    table = Table(
        box=box.SIMPLE_HEAD, title=Text(f"{title}{report.seconds:g} s", style="bold"), title_justify="left",
        padding=(0, 1, 0, 0), show_header=False,
    )  # fmt: skip
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in _rows(report):
        table.add_row(name, Text(value))
    return table


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    yield "answers", (
        f"{report.started:,} begun, {report.finished:,} finished, {report.failed:,} failed, {report.running:,} running"
    )
    yield "failed while covered", f"{report.failed_while_covered:,}"
    yield "tokens/s, all", f"{report.tokens_per_s:,.1f}"
    yield "tokens/s, an answer", "  ".join(
        f"p{which} {rate:.1f}" for which, rate in zip((10, 50, 90), report.rates, strict=True)
    )
    yield "first token, ms", _percentiles(report.first_token_s)
    causes = ", ".join(f"{count:,} by {cause}" for cause, count in report.stalls_by_cause.items())
    yield "stalls", f"{report.stalls:,}" + (f" ({causes})" if causes else "")
    yield "stalls, ms", _percentiles(report.stall_s)
    yield "longest gap of an answer, ms", _percentiles(report.gap_s)
    yield "changes of route", (
        f"{report.losses:,} losses, {report.moves:,} moves, {report.handed_over:,} handed over without a stall"
    )
    yield "peers", (
        f"{report.joined:,} joined, {report.left:,} left, {report.died:,} died, {report.rebalanced:,} rebalanced, "
        f"{report.faults:,} faults"
    )
    yield "coverage", f"{report.least_coverage:,} at least; some block bare for {report.uncovered_s:.1f} s"
    yield "fairness (Jain)", f"clients {report.fairness_clients:.2f}, peers {report.fairness_peers:.2f}"
    yield "plans", _planning(report.planning)


def _planning(planning: Planning) -> str:
    words = f"{planning.plans:,}, each over {planning.candidates:.0f} of the peers"
    return words if planning.ms_p50 is None else f"{words}, ms {_times(planning)}"


def _times(planning: Planning) -> str:
    return f"p50 {planning.ms_p50 or 0:.1f}  p99 {planning.ms_p99 or 0:.1f}"


def _percentiles(seconds: Sequence[float]) -> str:
    names = ("p50", "p90", "p99", "longest")
    return "  ".join(f"{name} {milliseconds(value)}" for name, value in zip(names, seconds, strict=True))


def _drawings(report: Report) -> Iterator[RenderableType]:
    for name, values, unit in (
        ("tokens/s over time", report.tokens_over_time, ""),
        ("longest stall over time", [1e3 * value for value in report.stalls_over_time], " ms"),
    ):
        if any(values):
            yield Text(f"{name}, up to {max(values):,.0f}{unit}", style="dim")
            yield Text(f"|{sparkline(values)}|", no_wrap=True)


def _growth(growth: Sequence[Planning]) -> Table:
    title = Text("a plan as the swarm grows", style="bold")
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0))
    for header in ("peers", "looked at", "moves tried", "ms, median", "ms, p99"):
        table.add_column(header, justify="right", no_wrap=True)
    for each in growth:
        times = ("-", "-") if each.ms_p50 is None else (f"{each.ms_p50:.1f}", f"{each.ms_p99 or 0:.1f}")
        table.add_row(f"{each.peers:,}", f"{each.candidates:.0f}", f"{each.relaxations:,.0f}", *times)
    return table


def _count(count: int, name: str) -> str:
    return f"{count:,} {name}{'s' * (count != 1)}"
