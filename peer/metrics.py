"""What a peer tells Prometheus: its figures, read from the objects that have them when somebody asks; those of a model
with its name and the beginning of its swarm's id as labels.

Owns the names of the metrics and what each means. Nothing is kept here and nothing runs between two questions; the
numbers are those of `counts.py` and of the peer's other parts, read on the event loop. Does not know HTTP
(`scrape.py` does). `prometheus_client` is imported here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from peer.announcer import Announcer
from peer.cache import SeatCache
from peer.counts import Passes, Spread
from peer.service import Service
from peer.spread import SpreadCache
from routing.types import PeerRecord, PeerState
from swarm.frames import SWARM_BYTES
from swarm.hive import Daemon, Hive
from swarm.transport import Endpoint

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
PREFIX = "swarm_peer_"

Families = Iterator[Metric]


class Metrics(Collector):
    """The metrics of one peer, apart from all others in the process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._of_process: list[Callable[[], Iterable[Metric]]] = []
        self._of_models: list[tuple[dict[str, str], Callable[[], Iterable[Metric]]]] = []
        ProcessCollector(registry=self._registry)  # memory, processor seconds, open files, by their usual names
        self._registry.register(self)

    def collect(self) -> Families:
        for source in self._of_process:
            yield from source()
        families: dict[str, Metric] = {}
        for labels, source in self._of_models:
            for metric in source():
                samples = [sample._replace(labels={**sample.labels, **labels}) for sample in metric.samples]
                family = families.setdefault(metric.name, metric)
                family.samples = samples if family is metric else family.samples + samples
        yield from families.values()

    def page(self) -> bytes:
        """All of them in Prometheus' text format. Call it on the event loop: it reads what changes there."""
        return generate_latest(self._registry)

    def watch_process(self, endpoint: Endpoint, daemon: Daemon) -> None:
        """Links, traffic, p2pd."""
        self._of_process += [lambda: _links(endpoint), lambda: _daemon(daemon)]

    def watch_service(self, model: str, swarm_id: bytes, service: Callable[[], Service | None]) -> None:
        """Sessions, cache, passes of a model: of the service that has new sessions now, if there is one."""

        def figures() -> Iterable[Metric]:
            if (now := service()) is not None:
                for each in (_sessions, _cache, _work, _healing):
                    yield from each(now)

        self._watch(model, swarm_id, figures)

    def watch_directory(
        self, model: str, swarm_id: bytes, record: Callable[[], PeerRecord], announcer: Announcer, hive: Hive
    ) -> None:
        """What this peer says of itself in a swarm's directory. `record` describes the peer as it is now."""
        self._watch(model, swarm_id, lambda: _directory(record(), announcer, hive))

    def _watch(self, model: str, swarm_id: bytes, source: Callable[[], Iterable[Metric]]) -> None:
        labels = {"model": model, "swarm": swarm_id[:SWARM_BYTES].hex()}
        self._of_models.append((labels, source))


# -- by what they are about ------------------------------------------------------------------------------------


def _sessions(service: Service) -> Families:
    table = service.table
    yield _gauge("sessions", "Sessions that this peer holds.", len(table.sessions))
    yield _gauge("sessions_in_use", "Of these, those on a route and heard of in the last seconds.", service.sessions)
    seats = GaugeMetricFamily(
        PREFIX + "seats",
        "States of sessions, by what they are to their route: a hop, a standby, or out of it and kept.",
        labels=["role"],
    )
    roles = {"hop": 0, "standby": 0, "kept": 0}
    for session in table.sessions.values():
        for seat in session.seats.values():
            roles["kept" if seat.hop is None else "standby" if seat.stands_by else "hop"] += 1
    for role, number in roles.items():
        seats.add_metric([role], number)
    yield seats
    counts = table.counts
    yield _counter("sessions_opened", "Sessions opened.", counts.sessions_opened)
    yield _counter("sessions_refused", "OPENs refused: no room, or this peer leaves.", counts.sessions_refused)
    yield _counter("hand_overs", "Sessions whose clients were asked to move them: this peer leaves.", counts.hand_overs)


def _cache(service: Service) -> Families:
    budget, kept = service.budget, service.table.prefixes.stores()
    kept_bytes = sum(store.nbytes for store in kept if isinstance(store, SeatCache | SpreadCache))
    position_bytes = service.blocks.shape.position_bytes(len(service.blocks.span))

    def positions(nbytes: int) -> int:
        return nbytes // position_bytes

    yield _gauge("cache_used_bytes", "Keys, values and journals that are held.", budget.used_bytes)
    yield _gauge("cache_limit_bytes", "What they may take at most.", budget.limit_bytes)
    what = "in positions of a session that uses all blocks of this peer."
    yield _gauge("cache_used_positions", f"What is held, {what}", positions(budget.used_bytes))
    yield _gauge("cache_limit_positions", f"What may be held at most, {what}", service.cache_positions)
    yield _gauge(
        "cache_kept_positions", f"Of what is held, what closed sessions left for later ones, {what}",
        positions(kept_bytes),
    )  # fmt: skip
    counts = service.table.counts
    yield _labelled(
        "evictions", "Contents that went for want of room: seats, and what closed sessions left.", "of",
        {"seat": counts.seats_evicted, "prefix": counts.prefixes_evicted},
    )  # fmt: skip
    yield _counter("adopted_positions", "Positions taken over from another session of a client.", counts.adopted)


def _work(service: Service) -> Families:
    counts = service.table.counts
    kinds = {"decode": counts.decode, "prefill": counts.prefill, "standby": counts.standby}
    tokens = {kind: int(passes.rows.sum) for kind, passes in kinds.items()}
    yield _labelled("tokens", "Tokens computed, each through the blocks of its hop.", "kind", tokens)
    busy = {kind: passes.busy_s for kind, passes in kinds.items()}
    yield _labelled("busy_seconds", "Time spent computing passes.", "kind", busy)
    yield _spreads("pass_rows", "Tokens in a pass; the count is the number of passes.", kinds, lambda p: p.rows)
    yield _spreads("step_queue_seconds", "From a step's arrival to its pass.", kinds, lambda p: p.queue_s)
    yield _spreads("step_compute_seconds", "Computing of the pass that a step was in.", kinds, lambda p: p.compute_s)
    yield _gauge("waiting_steps", "Steps that wait for a pass.", service.pipeline.waiting)
    yield _labelled("steps_refused", "Steps that were not computed.", "reason", dict(counts.steps_refused))
    yield _counter("frames_refused", "Frames that broke the rules of a session.", counts.frames_refused)
    load = service.load
    yield _gauge("decode_block_seconds", "One token through one block, as this peer publishes it.", load.decode_s)
    yield _gauge("prefill_block_seconds", "The same of one token of a long chunk.", load.prefill_s)


def _healing(service: Service) -> Families:
    counts = service.table.counts
    what = "Times that positions were missing here and asked for: after a loss, or where a beginning seemed shared."
    yield _counter("gaps", what, counts.gaps)
    yield _counter("replayed_positions", "Positions sent again to a hop that missed them.", counts.replayed)
    yield _counter("standby_positions", "Positions sent to standbys of the next hop.", counts.sent_to_standbys)
    yield _counter("takeovers", "Standbys here that were called into a route.", counts.takeovers)
    yield _labelled(
        "pages_positions", "Positions whose keys and values moved between peers without computing.", "direction",
        {"out": counts.pages_given, "in": counts.pages_taken},
    )  # fmt: skip


def _links(endpoint: Endpoint) -> Families:
    roles, traffic = {"client": 0, "peer": 0}, endpoint.traffic
    for link in endpoint.links:
        roles[link.role] += 1
    links = GaugeMetricFamily(PREFIX + "links", "Connections, by who is at the other end.", labels=["to"])
    for role, number in roles.items():
        links.add_metric([role], number)
    yield links
    frames = {"in": traffic.frames_in, "out": traffic.frames_out}
    yield _labelled("traffic_frames", "Frames of the data plane.", "direction", frames)
    nbytes = {"in": traffic.bytes_in, "out": traffic.bytes_out}
    yield _labelled("traffic_bytes", "Their bytes, without encryption.", "direction", nbytes)


def _daemon(daemon: Daemon) -> Families:
    yield _counter("p2pd_restarts", "Times that p2pd died and was started again.", daemon.restarts)


def _directory(record: PeerRecord, announcer: Announcer, hive: Hive) -> Families:
    info = InfoMetricFamily(PREFIX[:-1], "This peer.")
    info.add_metric([], {"peer_id": record.peer_id, "blocks": str(record.span)})
    yield info
    states = {state.name.lower(): state is record.state for state in PeerState}
    yield StateSetMetricFamily(PREFIX + "state", "What this peer says of itself.", states)
    yield _counter("record_failures", "Renewals of the record that came to nothing.", announcer.failures)
    stored = announcer.announced
    if stored is not None:
        yield _gauge("record_sequence", "Sequence number of the record in the directory.", stored.sequence)
        left_s = stored.expires_at - hive.dht_time()
        yield _gauge("record_expires_in_seconds", "Until that record expires; negative: it has.", left_s)


# -- shapes ----------------------------------------------------------------------------------------------------


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    """Its name on the page ends in `_total`."""
    return CounterMetricFamily(PREFIX + name, what, value=value)


def _labelled(name: str, what: str, label: str, values: dict[str, int] | dict[str, float]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, what, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _spreads(name: str, what: str, kinds: dict[str, Passes], spread: Callable[[Passes], Spread]) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, what, labels=["kind"])
    for kind, passes in kinds.items():
        values, total, buckets = spread(passes), 0, []
        for bound, number in zip((*map(float, values.bounds), "+Inf"), values.counts, strict=True):
            total += number
            buckets.append((str(bound), float(total)))
        family.add_metric([kind], buckets=buckets, sum_value=values.sum)
    return family
