"""Where the time of each step of a session went: among hops, client and recovery, and when within the step.

Read from `session.traces` and `session.recoveries`; for the table of `trace_table.py`, the pictures of `plots.py`, the
spans of `telemetry.py`, and as JSON. Pure: knows no terminal, no network and no clock. Times are in seconds, of the
monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from routing.types import Hop

if TYPE_CHECKING:
    from swarm.healing import Recovery
    from swarm.session import HopTrace, StepTrace

Kind = Literal["network", "queue", "compute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTime:
    """One step of a session: the time since the step before it ended, and where it went.

    The parts add up, unless a peer claims to have taken more than the whole.
    """

    number: int  # 1 for the first step, which brings the first token
    tokens: int  # sent in this step: many for a prompt, 1 for each token after it
    begin_s: float  # monotonic clock
    total_s: float
    hops: tuple[tuple[Hop, float], ...]  # queue, compute and network of each
    disturbed: bool  # the route changed meanwhile
    recovery_s: float  # of that: noticing, finding another, replaying what the new peer had not got
    client_s: float  # the model's head, sampling, and the caller's own code

    @property
    def end_s(self) -> float:
        return self.begin_s + self.total_s


def token_times(traces: Sequence[StepTrace], recoveries: Sequence[Recovery] = ()) -> list[TokenTime]:
    """One entry a step. A step that begins with a prompt counts from when it was sent: what went before it was the
    caller's time to think."""
    changes = [recovery.at_s for recovery in recoveries if recovery.before is not None]
    times: list[TokenTime] = []
    for number, trace in enumerate(traces, 1):
        begin = trace.at_s if trace.tokens > 1 or not times else times[-1].end_s
        total = trace.at_s + trace.total_s - begin
        disturbed = any(begin < at <= begin + total for at in changes)
        # What the network is said to have taken of a disturbed step is what nothing else explains: the recovery.
        hops = tuple((hop.hop, _busy(hop) + (0.0 if disturbed else hop.network_s)) for hop in trace.hops)
        in_hops = sum(seconds for _, seconds in hops)
        client = min(trace.at_s - begin, max(0.0, total - in_hops))
        rest = max(0.0, total - in_hops - client)
        times.append(
            TokenTime(
                number=number,
                tokens=trace.tokens,
                begin_s=begin,
                total_s=total,
                hops=hops,
                disturbed=disturbed,
                recovery_s=rest if disturbed else 0.0,
                client_s=client if disturbed else client + rest,
            )
        )
    return times


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A part of a step, and when it was. A hop's way back to the client is a leg of its network, too."""

    hop: Hop
    kind: Kind
    begin_s: float
    end_s: float


def legs(trace: StepTrace, *, disturbed: bool = False) -> list[Leg]:
    """The parts of a step, one after another, from when it was sent until its output came.

    Of a step that a change of route disturbed, only computing and queues are known; they come at its end, after the
    recovery. Where the parts add up to more than the whole, as those of hops that worked side by side on the chunks of
    a prompt, all are shortened alike.
    """
    network = [0.0 if disturbed else hop.network_s for hop in trace.hops]
    back = way_back(network)
    parts: list[tuple[Hop, Kind, float]] = []
    for index, each in enumerate(trace.hops):
        last = index == len(trace.hops) - 1
        parts += [
            (each.hop, "network", network[index] - back * last),
            (each.hop, "queue", each.queue_s),
            (each.hop, "compute", each.compute_s),
        ]
    if trace.hops:
        parts.append((trace.hops[-1].hop, "network", back))
    whole = sum(seconds for _, _, seconds in parts)
    scale = min(1.0, trace.total_s / whole) if whole else 1.0
    end = trace.at_s + trace.total_s
    at = max(trace.at_s, end - whole) if disturbed else trace.at_s
    result = []
    for hop, kind, seconds in parts:
        if seconds > 0:
            result.append(Leg(hop=hop, kind=kind, begin_s=at, end_s=min(end, at + scale * seconds)))
            at = result[-1].end_s
    return result


def way_back(network_s: Sequence[float]) -> float:
    """Of the last hop's network time, the way back to the client: as long as the way to the first hop is taken to be
    (see `session.py`). `network_s` is that of each hop."""
    if len(network_s) < 2:
        return sum(network_s) / 2
    return min(network_s[0], network_s[-1])


def trace_facts(traces: Sequence[StepTrace], recoveries: Sequence[Recovery] = ()) -> list[dict[str, Any]]:
    """One object a step, for JSON, times in milliseconds. `at_ms` counts from the first step; the network's share of a
    step that a change of route disturbed is null: `recovery_ms` has it."""
    return [
        {
            "step": time.number,
            "tokens": time.tokens,
            "at_ms": _ms(time.begin_s - traces[0].at_s),
            "ms": _ms(time.total_s),
            "client_ms": _ms(time.client_s),
            "recovery_ms": _ms(time.recovery_s),
            "hops": [_hop_facts(hop, disturbed=time.disturbed) for hop in trace.hops],
        }
        for trace, time in zip(traces, token_times(traces, recoveries), strict=True)
    ]


def _hop_facts(hop: HopTrace, *, disturbed: bool) -> dict[str, Any]:
    return {
        "peer": hop.hop.peer_id,
        "blocks": f"{hop.hop.entry}:{hop.hop.exit}",
        "network_ms": None if disturbed else _ms(hop.network_s),
        "queue_ms": _ms(hop.queue_s),
        "compute_ms": _ms(hop.compute_s),
        "wire_in": hop.wire_in or None,
        "wire_out": hop.wire_out or None,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _busy(hop: HopTrace) -> float:
    return hop.queue_s + hop.compute_s
