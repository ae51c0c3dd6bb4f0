"""A session's trace as OpenTelemetry spans: one for the generation, one a step below it, one a hop below that.

Owns the names of spans and attributes. `opentelemetry-api` (the extra `otel`) is imported when spans are made; where
they go is the caller's to set up. Seconds in attributes; spans are in nanoseconds of Unix time, as the API has it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from routing.errors import StartError
from swarm.timeline import Leg, TokenTime, legs, token_times

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

    from swarm.healing import Recovery
    from swarm.session import StepTrace

Attributes = dict[str, Any]


def export(
    traces: Sequence[StepTrace],
    tracer: Tracer,
    recoveries: Sequence[Recovery] = (),
    *,
    epoch_s: float | None = None,
) -> None:
    """Makes the spans of `session.traces`; with `session.recoveries`, changes of route are told too.

    "generation" is below the caller's current span, if there is one. A "step" lasts from when it was sent until its
    output came. A "hop" lasts from when the data left for it until its output was computed, that of the last hop until
    the client had it; events say when the data arrived, and when computing began and ended. `epoch_s` is added to the
    traces' monotonic clock to get Unix time; None: what the two clocks differ by now.

    Raises StartError without opentelemetry-api.
    """
    try:
        from opentelemetry.trace import set_span_in_context
    except ImportError as error:
        raise StartError(
            "spans need opentelemetry-api", advice="Install it: pip install 'swarm-runtime[otel]'."
        ) from error
    if not traces:
        return
    spans = _Spans(tracer, time.time() - time.monotonic() if epoch_s is None else epoch_s)
    tokens = sum(trace.tokens for trace in traces)
    begin_s, end_s = traces[0].at_s, max(trace.at_s + trace.total_s for trace in traces)
    whole = spans.begin("generation", begin_s, {"swarm.steps": len(traces), "swarm.tokens": tokens})
    for recovery in recoveries:
        if recovery.before is not None and begin_s <= recovery.at_s <= end_s:
            attributes = {"swarm.reason": recovery.reason, "swarm.recovery_s": recovery.seconds}
            whole.add_event("route changed", attributes, spans.unix_ns(recovery.at_s))
    inside = set_span_in_context(whole)
    for trace, times in zip(traces, token_times(traces, recoveries), strict=True):
        step = spans.begin("step", trace.at_s, _step_attributes(trace, times), inside)
        _hop_spans(spans, trace, times, set_span_in_context(step, inside))
        spans.end(step, trace.at_s + trace.total_s)
    spans.end(whole, end_s)


class _Spans:
    """Spans by the clock of the traces."""

    def __init__(self, tracer: Tracer, epoch_s: float):
        self._tracer, self._epoch_ns = tracer, round(epoch_s * 1e9)

    def unix_ns(self, at_s: float) -> int:
        return round(at_s * 1e9) + self._epoch_ns

    def begin(self, name: str, at_s: float, attributes: Attributes, inside: Context | None = None) -> Any:
        """`inside` None: where the caller is."""
        return self._tracer.start_span(name, inside, attributes=attributes, start_time=self.unix_ns(at_s))

    def end(self, span: Any, at_s: float) -> None:
        span.end(self.unix_ns(at_s))


def _step_attributes(trace: StepTrace, times: TokenTime) -> Attributes:
    return {
        "swarm.step": times.number,
        "swarm.tokens": trace.tokens,
        "swarm.epoch": trace.epoch,
        "swarm.client_s": times.client_s,
        "swarm.recovery_s": times.recovery_s,
    }


def _hop_spans(spans: _Spans, trace: StepTrace, times: TokenTime, inside: Context) -> None:
    by_hop = groupby(legs(trace, disturbed=times.disturbed), key=lambda leg: leg.hop)
    found = {hop: list(own) for hop, own in by_hop}
    for number, hop in enumerate(trace.hops, 1):
        attributes: Attributes = {
            "swarm.hop": number,
            "swarm.peer": hop.hop.peer_id,
            "swarm.blocks": f"{hop.hop.entry}:{hop.hop.exit}",
            "swarm.queue_s": hop.queue_s,
            "swarm.compute_s": hop.compute_s,
        }
        if hop.wire_in:
            attributes |= {"swarm.wire_in": hop.wire_in, "swarm.wire_out": hop.wire_out}
        if not times.disturbed:  # else nobody knows
            attributes["swarm.network_s"] = hop.network_s
        if own := found.get(hop.hop):
            span = spans.begin("hop", own[0].begin_s, attributes, inside)
            for name, at_s in _moments(own):
                span.add_event(name, timestamp=spans.unix_ns(at_s))
            spans.end(span, own[-1].end_s)


def _moments(own: Sequence[Leg]) -> list[tuple[str, float]]:
    """Of one hop: a queue of no length is none."""
    busy = [leg for leg in own if leg.kind != "network"]
    computing = [leg for leg in busy if leg.kind == "compute"]
    moments = [("arrived", busy[0].begin_s)] if busy else []
    if computing:
        moments += [("computing", computing[0].begin_s), ("computed", computing[0].end_s)]
    return moments
