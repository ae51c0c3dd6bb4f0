"""One sequence's life in the swarm: tokens in, hidden states of the last block out, whatever happens on the way.

The rule is in `driver.py`, the choice of routes in `healing.py`; sockets and the view of the swarm are `client.py`'s.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from routing.constraints import Constraints
from routing.encoding import Wire
from routing.errors import BadInput, ProtocolError, SessionError
from routing.types import Hop, Objective, PeerId, Route
from swarm.codec import COMPUTE_DTYPES, decode_rows, encodings, lossless_codec, name_of, row_bytes
from swarm.driver import (
    Driver,
    DriverConfig,
    NeedRoute,
    Output,
    PeerLeaves,
    Send,
    StandbyLost,
    Stopped,
)
from swarm.frames import Codec, Frame, FrameType, new_session
from swarm.healing import Healing, Recovery
from swarm.names import NameChain
from swarm.saved import SavedGeneration, SavedSession
from swarm.standbys import MODES

if TYPE_CHECKING:
    from swarm.client import SwarmClient

WIRES = ("auto", "exact", "int8", *COMPUTE_DTYPES)
RESUMED_EPOCHS = 1 << 16  # above whatever the process before opened after it was saved last


@dataclass(frozen=True, slots=True, kw_only=True)
class HopTrace:
    """What one hop took of a step, in seconds. `network_s` is the way to it; the last hop's has the way back too.
    `from_peer_s` is of that the way from the hop before, as that peer measured it; 0: not known, or the first hop.
    `next_bytes_s`: bytes a second from it to the next hop, of late; 0: not known. `wire_in`, `wire_out`: the codecs of
    the hidden states that come to it and go on from it, by name; empty: not known."""

    hop: Hop
    queue_s: float
    compute_s: float
    network_s: float
    from_peer_s: float = 0.0
    next_bytes_s: float = 0.0
    wire_in: str = ""
    wire_out: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One step as the client saw it: when it was sent (monotonic clock), how long it took, and where the time went."""

    at_s: float
    total_s: float
    tokens: int
    epoch: int
    hops: tuple[HopTrace, ...]
    computed: int = 0  # positions, by every hop; 0: not known


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    wire: str = "exact"  # how hidden states are written: one of WIRES, see `SwarmModel.connect`
    chunk: int | None = None  # positions of a prefill frame; None: as `prefill_chunk` says
    wait_s: float = 0.0  # how long to wait for blocks that nobody serves; NEWCOMER_S of `routing/retry.py` at least
    recovery_s: float = 60.0  # how long a step may be held up by losses, however many routes are tried
    connect_s: float = 5.0  # a dial
    deadline_s: float | None = 60.0  # a step without any sign of progress, at most; learned from what steps take
    standby: str = "inputs"  # for each hop a second peer, where there is one: see MODES of `standbys.py`
    constraints: Constraints = field(default_factory=Constraints)  # which peers may run which blocks
    objective: Objective = Objective.LATENCY  # of its routes
    share_prefixes: bool = True  # with other sessions of this client, also later ones: peers keep what was closed

    def __post_init__(self) -> None:
        if self.standby not in MODES:
            raise BadInput(f"standby is one of {', '.join(MODES)}, not {self.standby!r}")
        if self.wire not in WIRES:
            raise BadInput(f"wire is one of {', '.join(WIRES)}, not {self.wire!r}")


class Session:
    """An open sequence. Not safe for two steps at once; closing it frees what its peers hold."""

    def __init__(self, client: SwarmClient, config: SessionConfig, saved: SavedSession | None = None):
        """`saved`: as another process left it, and with the tokens that it held."""
        self.client, self.config = client, config
        # A session belongs to the client that opened it, and so do the names of what its peers hold.
        ours = saved is not None and saved.client_id == client.peer_id
        self.id = saved.session if saved is not None and ours else new_session(client.join.fingerprint)
        self._scope = saved.scope if saved is not None and ours else client.scope
        head = client.head
        self._codec = lossless_codec(COMPUTE_DTYPES.get(config.wire, client.config.dtype))
        every = encodings(self._codec, head.hidden_size)
        self._encodings = {"auto": every, "int8": every[-1:]}.get(config.wire, every[:1])
        self.driver = Driver(
            session_id=self.id,
            nonce=secrets.token_bytes(8),
            names=self._chain(long=False),
            embed=self._embed,
            read=self._read,
            config=DriverConfig(
                chunk=config.chunk,
                deadline_s=config.deadline_s,
                codec=self._codec,
                choose={"auto": client.choose_codec, "int8": lambda *_: Codec.INT8}.get(config.wire),
                row_bytes=lambda codec: row_bytes(codec, head.hidden_size),
                shares=config.share_prefixes,
            ),
        )
        self.healing = Healing(self)
        self.closed = False
        self.traces: list[StepTrace] = []
        self.sent_at = 0.0  # of the last step
        self._sent_tokens = 0
        self._output: asyncio.Future[torch.Tensor] | None = None
        if saved is not None:
            self._resume(saved, ours)

    def _resume(self, saved: SavedSession, ours: bool) -> None:
        self._keep_to_one_regime(len(saved.tokens), 0.0)
        driver = self.driver
        driver.tokens.extend(saved.tokens)
        driver.names.extend(saved.tokens)
        driver.done_to = len(saved.tokens)
        if ours and self._may_lose:
            driver.codecs = dict(saved.codecs)
        if ours:
            driver.epoch = saved.epoch + RESUMED_EPOCHS
            self.healing.warm_peers = frozenset(saved.peers)

    def saved(self, position: int | None = None, generation: SavedGeneration | None = None) -> SavedSession:
        """What another process needs, with the first `position` tokens (None: all whose step has ended)."""
        driver = self.driver
        certain = driver.done_to if driver.awaiting else len(driver.tokens)
        return SavedSession(
            fingerprint=self.client.join.fingerprint,
            client_id=self.client.peer_id,
            session=self.id,
            epoch=max(0, driver.epoch),
            scope=self._scope,
            peers=sorted(driver.route.peers if driver.route is not None else self.healing.warm_peers),
            tokens=driver.tokens[: certain if position is None else position],
            codecs=dict(driver.codecs),
            generation=generation,
        )

    @property
    def _may_lose(self) -> bool:
        """Whether hidden states may come out of the wire otherwise than they went in."""
        return self.config.wire in ("auto", "int8")

    @property
    def wire(self) -> Wire:
        """What its hidden states may be written in."""
        results, settled = name_of(self._codec), self.driver.codecs
        return replace(self.client.wire, encodings=self._encodings, results=results, settled=settled)

    def _chain(self, long: bool) -> NameChain:
        """What must not be shared has another root: other codecs, what may have lost something on the wire, what was
        computed before a peer was found wrong, a session that wants to be alone, longrope's other regime."""
        alone = b"" if self.config.share_prefixes else self.id
        codec = self._codec.name.encode() + (b"+" if self._may_lose else b"")
        parts = codec, b"%d" % self._scope, alone, b"long" if long else b""
        return NameChain(self.client.name_secret, b"/".join(parts))

    def _keep_to_one_regime(self, positions: int, now: float) -> None:
        """With longrope, a sequence that outgrows the short regime is computed anew in the long one, as the library's
        `generate` does; one that was taken back far enough, in the short one."""
        short, driver = self.client.short_context, self.driver
        if short is None or (driver.context > short) == (positions > short):
            return
        driver.rename(self._chain(long=positions > short), positions)
        if driver.route is not None and not driver.healing:
            self.healing.reopen(driver.route, driver.standing_by, now)

    # -- what a generation needs -----------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Tokens held."""
        return len(self.driver.tokens)

    @property
    def token_ids(self) -> Sequence[int]:
        return self.driver.tokens

    @property
    def route(self) -> Route | None:
        return self.driver.route

    @property
    def standbys(self) -> tuple[Hop, ...]:
        """Who stands by, with the blocks of its hop."""
        return self.driver.standing_by

    @property
    def standbys_ready(self) -> bool:
        """Whether there is one for each hop, and each has what its hop has."""
        spans = {(hop.entry, hop.exit) for hop in self.standbys if self.driver.is_full(hop)}
        return self.route is not None and all((hop.entry, hop.exit) in spans for hop in self.route)

    @property
    def recoveries(self) -> list[Recovery]:
        """Each route that was taken, and why."""
        return self.healing.recoveries

    async def step(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Append tokens; returns the last block's output [1, hidden] at the last one.

        Raises NoRoute, Superseded, TimedOut, Overloaded; the session may be used again after NoRoute and TimedOut.
        If the caller is cancelled the tokens stay appended: roll back if they are not wanted.
        """
        if self.closed:
            raise BadInput("the session is closed")
        if self.driver.stopped is not None:
            raise self.driver.stopped
        if self._output is not None:
            raise BadInput("a session takes one step at a time", advice="Open one session a sequence.")
        vocab = self.client.head.embedding.shape[0]
        if wrong := [token for token in token_ids if not 0 <= token < vocab]:
            raise BadInput(f"token id {wrong[0]} is not in the model's vocabulary of {vocab}")
        if self.driver.awaiting:
            self.driver.rollback(self.driver.done_to)  # a step that was cancelled; its tokens come with this one
        now = time.monotonic()
        self._output = asyncio.get_running_loop().create_future()
        self.sent_at, self._sent_tokens = now, len(token_ids)
        self._keep_to_one_regime(self.position + len(token_ids), now)
        self.healing.step_begins(len(token_ids), now)
        self.driver.step(token_ids, now)
        self.act()
        self.healing.step_sent()
        try:
            return await self._output
        finally:
            self._output = None

    def rollback(self, position: int) -> None:
        """Forget the tokens from `position` on; peers learn of it with the next step."""
        self.driver.rollback(position)

    async def exclude(self, peer_id: PeerId, *, keep_to: int = 0) -> None:
        """This peer was found to compute wrongly from `keep_to` on: never use it again in this session, and let
        nothing of it survive downstream. The caller rolls back the tokens that it no longer trusts. If nobody else
        serves its blocks, the next step says so."""
        self.healing.exclude(frozenset({peer_id}))
        self.client.health.failed(peer_id, time.monotonic(), weight=4.0)
        self.client.scope += 1
        self.driver.distrust(peer_id, keep_to)
        self.act()
        await self.healing.finished()

    async def close(self) -> None:
        """Frees the session on every peer that it ever used."""
        if self.closed:
            return
        self.closed = True
        await self.healing.close()
        self.driver.close(keep=self.config.share_prefixes)
        self.act()
        self.fail(SessionError("the session is closed"))
        self.client.forget(self)

    # -- what the links bring --------------------------------------------------------------------------------

    def frame_received(self, frame: Frame, sender: PeerId) -> None:
        now = time.monotonic()
        self.driver.receive(frame, sender, now)
        self.act()
        if frame.type is FrameType.OPENED and not self.driver.awaiting:
            self.healing.renew(now)  # a standby may be warm: no step need come to move to it

    def link_lost(self, peer_id: PeerId, reason: str) -> None:
        self.healing.link_lost(peer_id)
        self.driver.link_lost(peer_id, reason)
        self.act()

    def tick(self, now: float) -> None:
        self.driver.tick(now)
        self.act()

    def act(self) -> None:
        """Carry out what the driver decided."""
        for effect in self.driver.take_effects():
            match effect:
                case Send(peer_id, frame):
                    link = self.client.link(peer_id)
                    if self.closed:
                        self.client.say_goodbye(peer_id, frame)
                    elif link is not None:
                        link.send(frame)
                    else:
                        self.driver.link_lost(peer_id, "no connection")
                case Output():
                    self._done(effect)
                case NeedRoute():
                    self.healing.need_route(effect)
                case StandbyLost():
                    self.healing.standby_lost(effect)
                case PeerLeaves(peer_id):
                    self.healing.peer_leaves(peer_id)
                case Stopped(error):
                    self.fail(error)
        if self.driver.effects:
            self.act()

    def _done(self, output: Output) -> None:
        now = time.monotonic()
        self.healing.step_ended()
        hidden = output.rows[0] if len(output.rows) == 1 else torch.cat(output.rows)
        if self.driver.route is not None:
            trace = _trace(self.driver, self.driver.route, output, self.sent_at, now, self._sent_tokens)
            self.traces.append(trace)
            self.client.learn(trace)
            if trace.tokens == 1:
                self.healing.step_took(trace.total_s)
        if self._output is not None and not self._output.done():
            self._output.set_result(hidden[-1:])

    def fail(self, error: BaseException) -> None:
        if self._output is not None and not self._output.done():
            self._output.set_exception(error)

    # -- rows ------------------------------------------------------------------------------------------------

    def _embed(self, start: int, end: int, codec: Codec) -> memoryview:
        return self.client.embed(self.driver.tokens[start:end], start, codec)

    def _read(self, frame: Frame) -> torch.Tensor | None:
        rows = decode_rows(frame.rows, Codec(frame.codec), self.client.head.hidden_size)
        if len(rows) != frame.end - max(frame.start, frame.note.want):
            raise ProtocolError(f"{len(rows)} rows in a RESULT of {frame.end - frame.start} positions")
        return rows if bool(torch.isfinite(rows).all()) else None


def _trace(driver: Driver, route: Route, output: Output, sent: float, now: float, tokens: int) -> StepTrace:
    """The way to the first hop and back from the last is what remains of the whole."""
    hops, timings = [], output.timings
    between = [timing.rtt_next_us / 2e6 for timing in timings]
    busy = sum((timing.queue_us + timing.compute_us) / 1e6 for timing in timings)
    rest = max(0.0, now - sent - busy - sum(between[:-1]))
    for index, (hop, timing) in enumerate(zip(route, timings, strict=False)):
        network = rest / 2 if index == 0 else between[index - 1]
        if index == len(route) - 1:
            network += rest / 2
        hops.append(
            HopTrace(
                hop=hop,
                queue_s=timing.queue_us / 1e6,
                compute_s=timing.compute_us / 1e6,
                network_s=network,
                from_peer_s=between[index - 1] if index else 0.0,
                next_bytes_s=timing.next_bytes_s,
                wire_in=name_of(driver.codec_into(hop.entry)),
                wire_out=name_of(driver.codec_into(hop.exit)),
            )
        )
    return StepTrace(
        at_s=sent, total_s=now - sent, tokens=tokens, epoch=driver.epoch, hops=tuple(hops), computed=output.computed
    )
