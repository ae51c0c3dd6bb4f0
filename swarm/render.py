"""How the command line and notebooks show a swarm: plain data in, rich renderables out.

Owns tables, the coverage bar and the error panel. Does no I/O, asks nobody, knows no clock: who calls it has
the numbers. Everything reads well at 80 columns, in a notebook, and as plain text in a file (no colour, no
panel). Text from outside is never taken for markup. Times come in seconds and are shown in milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.jupyter import JupyterMixin
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from routing.condition import Condition, Judgement
from routing.errors import SwarmError
from routing.explain import Explanation
from routing.planner import HopCost, Plan
from routing.types import Hop, PeerId, PeerRecord, PeerState, Span
from swarm.terminal import harmless

NOTHING = "-"  # not known, or none
TEN = 10  # blocks between the gaps of the coverage bar
CONDITION_STYLES = {
    Condition.SERVING: "green",
    Condition.SLOW: "yellow",
    Condition.FULL: "yellow",
    Condition.JOINING: "cyan",
    Condition.DRAINING: "yellow",
    Condition.LEAVING: "dim",
    Condition.NO_ANSWER: "red",
    Condition.EXPIRED: "red",
}
_CONDITIONS = {
    PeerState.SERVING: Condition.SERVING,
    PeerState.JOINING: Condition.JOINING,
    PeerState.DRAINING: Condition.DRAINING,
    PeerState.LEAVING: Condition.LEAVING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """A peer as one line of the status. What was measured here stands before what the record claims."""

    record: PeerRecord
    rtt_s: float | None = None
    decode_s: float | None = None  # one token through one block, as measured
    prefill_s: float | None = None  # one token of a long chunk through one block, as measured
    banned: bool = False  # failed lately; avoided while others can do its work
    reachable: bool = True  # False: it did not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class HopTimes:
    """One hop of a route and its share of a token, in seconds. None: not known. `wire_in`, `wire_out`: the codecs of
    hidden states that come to it and go on from it; empty: not known."""

    hop: Hop
    network_s: float | None = None
    queue_s: float | None = None
    compute_s: float | None = None
    wire_in: str = ""
    wire_out: str = ""

    @property
    def total_s(self) -> float | None:
        known = [part for part in (self.network_s, self.queue_s, self.compute_s) if part is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSummary:
    """What a demonstration of recovery showed."""

    event: str  # what happened between: "peer abc123 was killed at token 40"
    before: tuple[HopTimes, ...]
    after: tuple[HopTimes, ...]
    tokens_per_s_before: float
    tokens_per_s_after: float
    stall_s: float  # the longest wait for a token around the event
    identical: bool | None  # the text is that of the local model; None: not compared


class Parts(JupyterMixin, Group):
    """One below the other, also in a notebook."""


def short_id(peer_id: PeerId) -> str:
    """The end of a peer id: all ids of one kind begin alike."""
    return peer_id[-6:]


def milliseconds(seconds: float | None) -> str:
    """Three digits or so: "0.42", "8.1", "140", "12,000". None: "-"."""
    if seconds is None:
        return NOTHING
    value = seconds * 1e3
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def wire_lines(hops: Sequence[HopTimes | HopCost]) -> Iterator[Text]:
    """What hidden states are written in: most of a route's ways, then where it is something else. A line, or none if it
    is not known."""
    ways = [(hop.wire_in, f"to {short_id(hop.hop.peer_id)}") for hop in hops]
    ways += [(hop.wire_out, "back") for hop in hops[-1:]]
    if ways and all(codec for codec, _ in ways):
        ((usual, _),) = Counter(codec for codec, _ in ways).most_common(1)
        others: dict[str, list[str]] = {}
        for codec, where in ways:
            if codec != usual:
                others.setdefault(codec, []).append(where)
        parts = [f"{', '.join(places)} in {codec}" for codec, places in others.items()]
        yield Text("; ".join([f"hidden states go in {usual}", *parts]))


def _table(title: str = "") -> Table:
    title_text = Text(title, style="bold") if title else None
    return Table(box=box.SIMPLE_HEAD, title=title_text, title_justify="left", padding=(0, 1, 0, 0))


def _numbers(table: Table, *headers: str) -> None:
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)


def condition_text(judgement: Judgement) -> Text:
    return Text(judgement.condition.value, style=CONDITION_STYLES[judgement.condition])


def status_table(rows: Sequence[PeerRow], judged: Mapping[PeerId, Judgement] | None = None) -> RenderableType:
    """One line a peer, in the order of its blocks. `judged` says more than the records do, where it is known."""
    judged = judged or {}
    if not rows:
        return Text("No peer has announced itself.")
    table = _table()
    for header in ("peer", "blocks", "state"):
        table.add_column(header, no_wrap=True)
    _numbers(table, "decode\nms/block", "prefill\nms/block", "queue\nms", "cache free\npositions", "rtt\nms")
    for row in sorted(rows, key=lambda row: (row.record.span, row.record.peer_id)):
        record = row.record
        state = condition_text(judged.get(record.peer_id) or Judgement(_CONDITIONS[record.state]))
        if row.banned:
            state = Text("avoided", style="red")
        if not row.reachable and record.peer_id not in judged:
            state = condition_text(Judgement(Condition.NO_ANSWER))
        free = NOTHING
        if record.cache_total:
            free = f"{record.cache_free:,} ({100 * record.cache_free // record.cache_total}%)"
        table.add_row(
            Text(short_id(record.peer_id)),
            blocks_of(record),
            state,
            milliseconds(row.decode_s if row.decode_s is not None else record.decode_s or None),
            milliseconds(row.prefill_s if row.prefill_s is not None else record.prefill_s or None),
            milliseconds(record.queue_s) if record.queue_s else "0",
            free,
            milliseconds(row.rtt_s),
        )
    return table


def reasons(judged: Mapping[PeerId, Judgement]) -> Iterator[Text]:
    """A line for each peer that is not simply serving."""
    for peer_id, judgement in judged.items():
        if judgement.reason:
            yield Text.assemble(f"{short_id(peer_id)}: ", condition_text(judgement), f", {harmless(judgement.reason)}")


def blocks_of(record: PeerRecord) -> str:
    """What it serves; of what, where the rest is still being loaded."""
    return f"{record.span} of {record.loads}" if record.loads is not None else str(record.span)


def spans_with(counts: Sequence[int], peers: int) -> list[Span]:
    """The runs of blocks that exactly so many peers serve."""
    spans, at = [], 0
    for count, run in groupby(counts):
        length = len(list(run))
        if count == peers:
            spans.append(Span(at, at + length))
        at += length
    return spans


def _listed(spans: Sequence[Span]) -> str:
    return ", ".join(map(str, spans))


@dataclass(frozen=True, slots=True)
class CoverageBar(JupyterMixin):
    """One cell a block: how many peers serve it ("+" above nine, "-" for nobody), and what that means."""

    counts: tuple[int, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        label = len(str(len(self.counts))) + 2
        per_line = max(1, (options.max_width - label) // (TEN + 1)) * TEN
        for start in range(0, len(self.counts), per_line):
            line = Text(no_wrap=True).append(f"{start:>{label - 2}}  ", style="dim")
            for index, count in enumerate(self.counts[start : start + per_line]):
                if index and index % TEN == 0:
                    line.append(" ")
                line.append_text(_cell(count))
            yield line
        yield self.verdict()

    def verdict(self) -> Text:
        missing = spans_with(self.counts, 0)
        if missing:
            total = sum(map(len, missing))
            share = f"{total} of {len(self.counts)} blocks"
            return Text(f"Nobody serves {_listed(missing)} ({share}): text cannot be generated.", style="red")
        single = spans_with(self.counts, 1)
        if single:
            return Text(f"All {len(self.counts)} blocks are served; only one peer serves {_listed(single)}.")
        served = (
            f"All {len(self.counts)} blocks are served, each by {min(self.counts, default=0)} peers or more."
        )
        return Text(served, style="green")


def _cell(count: int) -> Text:
    if count == 0:
        return Text("-", style="bold white on red")
    style = "black on yellow" if count == 1 else "black on green" if count == 2 else "black on bright_green"
    return Text(str(count) if count < 10 else "+", style=style)


def coverage_bar(counts: Sequence[int]) -> CoverageBar:
    """`counts`: number of peers that serve each block."""
    return CoverageBar(tuple(counts))


def route_table(hops: Sequence[HopTimes], title: str = "") -> RenderableType:
    """Hops in order, each with its share of a token; the last line is the sum."""
    table = _table(title)
    _numbers(table, "hop")
    for header in ("peer", "blocks"):
        table.add_column(header, no_wrap=True)
    _numbers(table, "network ms", "queue ms", "compute ms", "total ms")
    for number, times in enumerate(hops, 1):
        parts = (times.network_s, times.queue_s, times.compute_s, times.total_s)
        table.add_row(str(number), *_peer_and_blocks(times), *map(milliseconds, parts))
    if len(hops) > 1:
        table.add_section()
        columns = zip(*((h.network_s, h.queue_s, h.compute_s, h.total_s) for h in hops), strict=True)
        table.add_row("", "all", "", *(milliseconds(_sum(column)) for column in columns), style="bold")
    return Parts(table, *wire_lines(hops))


def explanation_tables(explanation: Explanation) -> RenderableType:
    """The route and the runner-up, term by term, and who was left out."""
    chosen, runner_up = explanation.chosen, explanation.runner_up
    parts: list[RenderableType] = [_plan_table(chosen, "the route", explanation.estimated), *wire_lines(chosen.terms)]
    if runner_up is None:
        parts.append(Text("No other route: each of its peers is needed."))
    else:
        more = f"{runner_up.cost_s / max(chosen.cost_s, 1e-9) - 1:+.0%}"
        parts += [_plan_table(runner_up, f"the runner-up ({more})", explanation.estimated)]
        parts += wire_lines(runner_up.terms)
    if explanation.estimated:
        parts.append(Text("~  a way that nobody measured yet, estimated", style="dim"))
    for plan, name in ((chosen, "the route"), (runner_up, "the runner-up")):
        if plan is not None and plan.slowest_s:
            parts.append(Text(f"{name}: {plan.rows_per_s:,.0f} rows a second where many flow at once"))
    parts += [Text(f"left out: {short_id(peer)}, {why}") for peer, why in sorted(explanation.left_out.items())]
    parts += map(Text, explanation.forbidden_lines)
    return Parts(*parts)


def _plan_table(plan: Plan, title: str, estimated: frozenset[Hop]) -> Table:
    table = _table(title)
    _numbers(table, "hop")
    for header in ("peer", "blocks"):
        table.add_column(header, no_wrap=True)
    _numbers(table, "network ms", "queue ms", "compute ms")
    further = {
        name: [getattr(term, field) for term in plan.terms]
        for name, field in (("replay ms", "replay_s"), ("penalty ms", "penalty_s"))
    }
    further = {name: values for name, values in further.items() if any(values)}
    _numbers(table, *further, "total ms")
    for number, term in enumerate(plan.terms, 1):
        network = milliseconds(term.network_s) + ("~" if term.hop in estimated else "")
        more = (milliseconds(values[number - 1]) for values in further.values())
        table.add_row(
            str(number), Text(short_id(term.hop.peer_id)), f"{term.hop.entry}:{term.hop.exit}", network,
            milliseconds(term.queue_s), milliseconds(term.compute_s), *more, milliseconds(term.total_s),
        )  # fmt: skip
    if len(plan.terms) > 1:
        table.add_section()
        columns = [[getattr(term, field) for term in plan.terms] for field in ("network_s", "queue_s", "compute_s")]
        sums = [milliseconds(sum(values)) for values in (*columns, *further.values())]
        table.add_row("", "all", "", *sums, milliseconds(plan.cost_s), style="bold")
    return table


def _peer_and_blocks(times: HopTimes) -> tuple[Text, str]:
    return Text(short_id(times.hop.peer_id)), f"{times.hop.entry}:{times.hop.exit}"


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def demo_table(summary: DemoSummary) -> RenderableType:
    """Both routes side by side, a hop that is new after the event marked with *, and the figures."""
    table = _table(summary.event)
    _numbers(table, "hop")
    for when in ("before", "after"):
        table.add_column(when, no_wrap=True)
        table.add_column("blocks", no_wrap=True)
        _numbers(table, "ms")
    old = {times.hop for times in summary.before}
    for number in range(max(len(summary.before), len(summary.after))):
        left = _half(summary.before, number)
        right = _half(summary.after, number)
        if number < len(summary.after) and summary.after[number].hop not in old:
            right[0] = Text.assemble(right[0], "*", style="bold cyan")
        table.add_row(str(number + 1), *left, *right)
    table.add_section()
    sums = [milliseconds(_sum([h.total_s for h in hops])) for hops in (summary.before, summary.after)]
    table.add_row("", "all", "", sums[0], "all", "", sums[1], style="bold")
    return Parts(table, *_figures(summary))


def _half(hops: Sequence[HopTimes], number: int) -> list[Text | str]:
    if number >= len(hops):
        return ["", "", ""]
    return [*_peer_and_blocks(hops[number]), milliseconds(hops[number].total_s)]


def _figures(summary: DemoSummary) -> Iterator[Text]:
    words = {True: ("yes", "green"), False: ("NO", "bold red"), None: ("not compared", "")}
    word, style = words[summary.identical]
    yield Text(f"tokens/s before       {summary.tokens_per_s_before:.1f}")
    yield Text(f"tokens/s after        {summary.tokens_per_s_after:.1f}")
    yield Text(f"longest stall         {milliseconds(summary.stall_s)} ms")
    yield Text.assemble("same as local model   ", (word, style))


@dataclass(frozen=True, slots=True)
class ErrorPanel(JupyterMixin):
    """What went wrong and what to do next: a panel on a terminal, two plain lines elsewhere."""

    message: str
    advice: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not (console.is_terminal or console.is_jupyter):
            yield Text(f"error: {self.message}", overflow="fold")
            if self.advice:
                yield Text(self.advice, overflow="fold")
            return
        body = Text(self.message)
        if self.advice:
            body.append(f"\n{self.advice}", style="dim")
        yield Panel(body, title="error", title_align="left", border_style="red", expand=False)


def error_panel(error: SwarmError) -> ErrorPanel:
    return ErrorPanel(str(error), error.advice)
