"""One look of `swarm top`: a line a peer with what changed since the look before, the bar of blocks, the reasons.

Owns what counts as a change, and how a look is drawn. Does no I/O and knows no clock: who calls it has the looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from routing.types import PeerId, PeerRecord
from swarm.render import NOTHING, blocks_of, condition_text, coverage_bar, milliseconds, reasons, short_id
from swarm.status import PeerSeen, Snapshot


class What(StrEnum):
    CAME = "came"
    GONE = "gone"
    STATE = "state"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to a peer between two looks. `before`: how it was, if it was there."""

    what: What
    before: PeerSeen | None = None

    @property
    def text(self) -> str:
        if self.what is What.STATE and self.before is not None:
            return f"was {self.before.judgement.condition}"
        if self.what is What.BLOCKS and self.before is not None:
            return f"had {self.before.record.span}"
        return self.what.value


MARKS = {What.CAME: ("+", "green"), What.GONE: ("-", "red"), What.STATE: ("*", "yellow"), What.BLOCKS: ("*", "yellow")}


def changes(before: Snapshot | None, after: Snapshot) -> dict[PeerId, Change]:
    """Who came, who is gone, whose condition or blocks are others. Nothing in the first look."""
    if before is None:
        return {}
    old = {peer.record.peer_id: peer for peer in before.peers}
    new = {peer.record.peer_id: peer for peer in after.peers}
    found = {peer_id: Change(What.CAME) for peer_id in new if peer_id not in old}
    for peer_id, peer in old.items():
        now = new.get(peer_id)
        if now is None:
            found[peer_id] = Change(What.GONE, peer)
        elif now.judgement.condition is not peer.judgement.condition:
            found[peer_id] = Change(What.STATE, peer)
        elif now.record.span != peer.record.span:
            found[peer_id] = Change(What.BLOCKS, peer)
    return found


def top_view(snapshot: Snapshot, changed: Mapping[PeerId, Change], note: str) -> RenderableType:
    """`note` stands beside the model's name: when this look was, or why there is no newer one."""
    about = snapshot.about
    serving = sum(peer.serves for peer in snapshot.peers)
    title = f"{about.model} ({about.family}, {about.n_blocks} blocks), {serving} of {len(snapshot.peers)} peers serve"
    gone = [
        change.before for change in changed.values() if change.what is What.GONE and change.before is not None
    ]
    rows = sorted([*snapshot.peers, *gone], key=lambda peer: (peer.record.span, peer.record.peer_id))
    judged = {peer.record.peer_id: peer.judgement for peer in snapshot.peers}
    return Group(
        Text.assemble((title, "bold"), "  ", (note, "dim")),
        _table(rows, changed),
        coverage_bar(snapshot.coverage),
        *reasons(judged),
    )


def _table(peers: Sequence[PeerSeen], changed: Mapping[PeerId, Change]) -> RenderableType:
    if not peers:
        return Text("No peer has announced itself.")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("", "peer", "blocks", "state"):
        table.add_column(header, no_wrap=True)
    for header in ("rtt\nms", "sessions", "queue\nms", "cache\nfree"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("changed", no_wrap=True)
    for peer in peers:
        record = peer.record
        change = changed.get(record.peer_id)
        mark, style = MARKS[change.what] if change else ("", "")
        gone = change is not None and change.what is What.GONE
        table.add_row(
            Text(mark, style=style),
            Text(short_id(record.peer_id)),
            blocks_of(record),
            Text(NOTHING) if gone else condition_text(peer.judgement),
            NOTHING if gone else milliseconds(peer.rtt_s),
            NOTHING if gone or peer.sessions is None else str(peer.sessions),
            NOTHING if gone else milliseconds(record.queue_s) if record.queue_s else "0",
            NOTHING if gone else _share_free(record),
            Text(change.text if change else "", style=style),
        )
    return table


def _share_free(record: PeerRecord) -> str:
    return f"{100 * record.cache_free // record.cache_total}%" if record.cache_total else NOTHING
