"""What a peer tells a newcomer who knows only the join code: the model's name and shape, and how to reach the peer.

Owns the bytes of this one answer. Like a record it is a claim of its peer: for people and for finding the way, never
for computing. The manifest says what the model truly is.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from routing.errors import ProtocolError
from swarm.records import MOST_BLOCKS

ABOUT = "about"  # the name under which a peer serves it
ABOUT_LIMIT = 16 * 1024
NAME_LIMIT = 200


class About(msgspec.Struct, frozen=True, kw_only=True):
    """`bootstrap`: multiaddrs of this peer, as they stand in join codes. Fields may be added; unknown ones are
    skipped."""

    model: str
    family: str
    n_blocks: int
    dtype: str
    bootstrap: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> About:
        """Raises ProtocolError."""
        try:
            about = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"what the peer says about its model is not readable: {error}") from None
        if not 1 <= about.n_blocks <= MOST_BLOCKS:
            raise ProtocolError(f"the peer says that its model has {about.n_blocks} blocks")
        if max(map(len, (about.model, about.family, about.dtype))) > NAME_LIMIT:
            raise ProtocolError("the peer tells an absurdly long name")
        return about


def public_name(model: str) -> str:
    """How a model is called in front of others: a hub id or short name as it is, of a path only its end."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model
