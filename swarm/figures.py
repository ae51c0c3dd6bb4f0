"""What the traces of a session say in figures: milliseconds a hop, tokens a second, stalls; for tables and for JSON.

Pure: knows no terminal, no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from routing.types import Route
from swarm.render import HopTimes

if TYPE_CHECKING:
    from swarm.healing import Recovery
    from swarm.session import StepTrace


def hop_times(route: Route, traces: Sequence[StepTrace]) -> tuple[HopTimes, ...]:
    """Each hop of `route` with the medians of its decode steps there; unknown where there was none."""
    steps = [
        trace.hops for trace in traces if trace.tokens == 1 and tuple(hop.hop for hop in trace.hops) == route.hops
    ]
    if not steps:
        return tuple(HopTimes(hop=hop) for hop in route)
    return tuple(
        HopTimes(
            hop=route[index],
            network_s=median(step[index].network_s for step in steps),
            queue_s=median(step[index].queue_s for step in steps),
            compute_s=median(step[index].compute_s for step in steps),
            wire_in=steps[-1][index].wire_in,
            wire_out=steps[-1][index].wire_out,
        )
        for index in range(len(route))
    )


def rate(times_s: Sequence[float]) -> float:
    """Tokens a second between the first and the last of these moments; 0 for fewer than two."""
    return (len(times_s) - 1) / max(times_s[-1] - times_s[0], 1e-9) if len(times_s) > 1 else 0.0


def longest_wait(times_s: Sequence[float]) -> float:
    """The longest time between two tokens, seconds."""
    return max((later - earlier for earlier, later in pairwise(times_s)), default=0.0)


def route_facts(hops: Sequence[HopTimes]) -> list[dict[str, Any]]:
    """A route for JSON; `ms` is the hop's share of a token, null if not known."""
    return [
        {
            "peer": times.hop.peer_id,
            "blocks": f"{times.hop.entry}:{times.hop.exit}",
            "ms": _ms(times.total_s),
            "wire_in": times.wire_in or None,
            "wire_out": times.wire_out or None,
        }
        for times in hops
    ]


def recovery_facts(recoveries: Sequence[Recovery]) -> list[dict[str, Any]]:
    """The changes of route, for JSON: the first route of a session is none."""
    return [
        {
            "position": recovery.position,
            "reason": recovery.reason,
            "ms": _ms(recovery.seconds),
            "before": str(recovery.before),
            "after": str(recovery.after),
        }
        for recovery in recoveries
        if recovery.before is not None
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)
