"""`swarm status`: who serves which blocks, why a peer does not, and which blocks nobody serves."""

from __future__ import annotations

from typing import Any

from swarm.joincode import JoinCode
from swarm.render import PeerRow, coverage_bar, reasons, spans_with, status_table
from swarm.status import PeerSeen, Snapshot, look
from swarm.terminal import Console

INCOMPLETE = 4  # as NoRoute: blocks that nobody serves


async def status(console: Console, join: str) -> int:
    """The exit code. Raises JoinError and its kin, DaemonFailed, TimedOut."""
    code = JoinCode.parse(join)
    with console.progress("joining the swarm") as progress:
        snapshot = await look(code, progress=progress)
    about = snapshot.about
    console.say(f"{about.model} ({about.family}, {about.n_blocks} blocks)")
    judged = {peer.record.peer_id: peer.judgement for peer in snapshot.peers}
    console.show(status_table([_row(peer) for peer in snapshot.peers], judged))
    for line in reasons(judged):
        console.show(line)
    console.show(coverage_bar(snapshot.coverage))
    for record in snapshot.leaving:
        console.say(f"{record.peer_id[-6:]} (blocks {record.span}) has just left")
    console.say("join code:")
    console.plain(snapshot.join_code)
    console.event(_facts(snapshot))
    return INCOMPLETE if snapshot.uncovered else 0


def _row(peer: PeerSeen) -> PeerRow:
    return PeerRow(record=peer.record, rtt_s=peer.rtt_s, reachable=peer.rtt_s is not None)


def _facts(snapshot: Snapshot) -> dict[str, Any]:
    return {**snapshot_facts(snapshot), "join_code": snapshot.join_code}


def snapshot_facts(snapshot: Snapshot) -> dict[str, Any]:
    """For JSON. Times in milliseconds."""
    about = snapshot.about
    return {
        "model": about.model,
        "family": about.family,
        "n_blocks": about.n_blocks,
        "complete": not snapshot.uncovered,
        "coverage": list(snapshot.coverage),
        "nobody_serves": [str(span) for span in spans_with(snapshot.coverage, 0)],
        "peers": [_peer_facts(peer) for peer in snapshot.peers],
        "left": [{"peer": record.peer_id, "blocks": str(record.span)} for record in snapshot.leaving],
    }


def _peer_facts(peer: PeerSeen) -> dict[str, Any]:
    record = peer.record
    return {
        "peer": record.peer_id,
        "blocks": str(record.span),
        "loads": None if record.loads is None else str(record.loads),
        "state": record.state.name.lower(),
        "condition": peer.judgement.condition.value,
        "reason": peer.judgement.reason or None,
        "answers": peer.rtt_s is not None,
        "rtt_ms": None if peer.rtt_s is None else round(peer.rtt_s * 1e3, 3),
        "decode_ms_per_block": round(record.decode_s * 1e3, 4),
        "prefill_ms_per_block": round(record.prefill_s * 1e3, 4),
        "queue_ms": round(record.queue_s * 1e3, 3),
        "cache_free": record.cache_free,
        "cache_total": record.cache_total,
        "sessions": peer.sessions,
        "dtype": record.dtype or None,
        "region": record.region or None,
        "addresses": list(record.addresses),
    }
