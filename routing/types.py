"""The nouns that all three packages share: peers, spans, hops, routes. Plain data; nothing here decides."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from routing.coordinates import Coordinate
from routing.errors import BadInput

PeerId = str
"""Base58 libp2p identity of an Ed25519 key; the public key is readable from it."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Consecutive blocks `[start, end)`."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise BadInput(f"{self.start}:{self.end} is not a span of blocks; write A:B with 0 <= A < B")

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, block: object) -> bool:
        return isinstance(block, int) and self.start <= block < self.end

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    @classmethod
    def parse(cls, text: str) -> Span:
        """`"0:15"` to a span. Raises BadInput."""
        start, colon, end = text.partition(":")
        if not (colon and start.strip().isdigit() and end.strip().isdigit()):
            raise BadInput(f"{text!r} is not a span of blocks; write A:B, for example 0:15")
        return cls(int(start), int(end))


class Objective(StrEnum):
    """What a session wants of its route. With the last two, chains as good are told apart by their latency."""

    LATENCY = "latency"  # the least time of one step
    THROUGHPUT = "throughput"  # the most rows a second, where many flow through the chain at once
    HOPS = "hops"  # the fewest hops, where each costs: a metered link

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Raises BadInput."""
        try:
            return cls(text)
        except ValueError:
            raise BadInput(f"objective is one of {', '.join(cls)}, not {text!r}") from None


def parse_region(text: str) -> str:
    """The name of a data region as all compare it: lower case. Raises BadInput."""
    name = text.lower()
    if not re.fullmatch("[a-z0-9-]{1,16}", name):
        raise BadInput(f"{text[:40]!r} is not a region; write up to 16 letters, digits and hyphens, as in eu-west")
    return name


class PeerState(IntEnum):
    JOINING = 0
    SERVING = 1
    DRAINING = 2  # finishes what it has, takes nothing new
    LEAVING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    """What a peer says of itself in the DHT (a claim: measurement overrules it). Times in seconds."""

    peer_id: PeerId
    span: Span
    state: PeerState = PeerState.SERVING
    addresses: tuple[str, ...] = ()  # data plane: "127.0.0.1:4001", "[::1]:4001"
    sequence: int = 0
    expires_at: float = 0.0  # DHT time
    decode_s: float = 0.0  # one token through one block; 0: not stated
    prefill_s: float = 0.0  # one token of a long chunk through one block; 0: not stated
    queue_s: float = 0.0  # work waiting now
    cache_free: int = 0  # positions that still fit
    cache_total: int = 0
    place: Coordinate | None = None  # where it is in the network; None: not known
    dtype: str = ""  # what its blocks compute in, "/int8" behind it if their weights are quantized; empty: not stated
    region: str = ""  # the data region that its owner states; empty: not stated
    int8_value_s: float = 0.0  # writing and reading one value of a hidden state in 8 bits; 0: not stated
    loads: Span | None = None  # what it will serve, where it serves the first of these blocks and loads the rest

    @property
    def settled(self) -> Span:
        """What it serves once all is loaded."""
        return self.loads or self.span


@dataclass(frozen=True, slots=True, order=True)
class Hop:
    """One peer with the blocks `[entry, exit)` that it runs in a route."""

    peer_id: PeerId
    entry: int
    exit: int

    def __len__(self) -> int:
        return self.exit - self.entry

    def __str__(self) -> str:
        return f"{self.peer_id[-6:]}[{self.entry}:{self.exit}]"


@dataclass(frozen=True, slots=True)
class Route:
    """Hops in order that cover all blocks once."""

    hops: tuple[Hop, ...]

    def __post_init__(self) -> None:
        at = 0
        for hop in self.hops:
            if hop.entry != at or hop.exit <= hop.entry:
                raise BadInput(f"not a chain: {' -> '.join(map(str, self.hops))}")
            at = hop.exit

    def __len__(self) -> int:
        return len(self.hops)

    def __iter__(self):
        return iter(self.hops)

    def __getitem__(self, index: int) -> Hop:
        return self.hops[index]

    @property
    def peers(self) -> frozenset[PeerId]:
        return frozenset(hop.peer_id for hop in self.hops)

    def __str__(self) -> str:
        return " -> ".join(map(str, self.hops))
