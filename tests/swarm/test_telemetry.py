"""A trace as spans, read back from OpenTelemetry's own exporter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import use_span

from routing.errors import StartError
from swarm import telemetry
from tests.swarm.test_plots import CLIENT_S, COMPUTE_S, HOP_S, NETWORK_S, QUEUE_S, A, B, C, answer

EPOCH_S = 1_700_000_000.0


class Exported:
    """A tracer, and the spans that it made: by name, in order of their begin."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self._provider.get_tracer("tests")

    def __getitem__(self, name: str) -> list[Any]:
        spans = [span for span in self._exporter.get_finished_spans() if span.name == name]
        return sorted(spans, key=lambda span: span.start_time)

    def close(self) -> None:
        self._provider.shutdown()


@pytest.fixture
def spans() -> Iterator[Exported]:
    exported = Exported()
    yield exported
    exported.close()


def ms(nanoseconds: int) -> Any:
    return pytest.approx(nanoseconds / 1e6, abs=1e-3)


def test_a_span_a_step_with_a_span_a_hop(spans):
    traces, recoveries, _ = answer(4)
    telemetry.export(traces, spans.tracer, recoveries, epoch_s=EPOCH_S)
    (whole,), steps, hops = spans["generation"], spans["step"], spans["hop"]
    assert len(steps) == 4 and len(hops) == 8 and whole.parent is None
    assert whole.attributes == {"swarm.steps": 4, "swarm.tokens": 43} and not whole.events
    assert {step.parent.span_id for step in steps} == {whole.context.span_id}
    assert (whole.start_time, whole.end_time) == (steps[0].start_time, steps[-1].end_time)
    for step, trace in zip(steps, traces, strict=True):
        assert step.start_time == round(trace.at_s * 1e9) + 1_700_000_000 * 10**9
        assert 1e3 * trace.total_s == ms(step.end_time - step.start_time)
        first, last = [hop for hop in hops if hop.parent.span_id == step.context.span_id]
        assert step.start_time == first.start_time <= first.end_time == last.start_time
        assert abs(last.end_time - step.end_time) <= 1
    assert steps[1].attributes["swarm.client_s"] == pytest.approx(CLIENT_S)
    assert steps[1].attributes["swarm.step"] == 2 and steps[1].attributes["swarm.tokens"] == 1
    # The last hop has the way back, as long as the way to the first.
    first, last = hops[2:4]
    assert 1e3 * HOP_S == ms(first.end_time - first.start_time) == ms(last.end_time - last.start_time)
    assert first.attributes == {
        "swarm.hop": 1, "swarm.peer": A, "swarm.blocks": "0:15", "swarm.queue_s": QUEUE_S,
        "swarm.compute_s": COMPUTE_S, "swarm.network_s": NETWORK_S,
    }  # fmt: skip
    assert [event.name for event in first.events] == ["arrived", "computing", "computed"]
    moments = [first.start_time, *(event.timestamp for event in first.events)]
    between = [(later - earlier) / 1e6 for earlier, later in pairwise(moments)]
    assert between == pytest.approx([1e3 * NETWORK_S, 1e3 * QUEUE_S, 1e3 * COMPUTE_S], abs=1e-3)
    assert first.events[-1].timestamp == first.end_time
    assert last.attributes["swarm.peer"] == B
    assert last.events[-1].timestamp == pytest.approx(last.end_time - 1e9 * NETWORK_S, abs=2)


def test_a_change_of_route_is_told(spans):
    traces, recoveries, _ = answer(6, killed=3)
    telemetry.export(traces, spans.tracer, recoveries, epoch_s=0.0)
    (event,) = spans["generation"][0].events
    assert event.name == "route changed" and event.attributes["swarm.reason"] == "connection lost"
    assert event.timestamp == round(recoveries[1].at_s * 1e9)
    held_up = spans["step"][3]
    assert held_up.attributes["swarm.recovery_s"] > 0.3
    own = [hop for hop in spans["hop"] if hop.parent.span_id == held_up.context.span_id]
    assert [hop.attributes["swarm.peer"] for hop in own] == [A, C]
    assert not any("swarm.network_s" in hop.attributes for hop in own)


def test_it_is_below_the_callers_span_and_on_the_systems_clock(spans, monkeypatch):
    monkeypatch.setattr(telemetry.time, "time", lambda: 1000.0)
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: 90.0)
    traces, _, _ = answer(2)
    assert traces[0].at_s == 100.0
    with use_span(mine := spans.tracer.start_span("mine"), end_on_exit=True):
        telemetry.export(traces, spans.tracer)
    (whole,) = spans["generation"]
    assert whole.parent.span_id == mine.context.span_id and whole.start_time == 1010 * 10**9


def test_no_steps_no_spans(spans):
    telemetry.export([], spans.tracer)
    assert not spans["generation"]


def test_without_the_api_the_error_names_the_extra(monkeypatch, spans):
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(StartError) as caught:
        telemetry.export(answer(2)[0], spans.tracer)
    assert "swarm-runtime[otel]" in caught.value.advice
