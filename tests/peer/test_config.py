"""What a peer is told at start, checked before anything is begun."""

from __future__ import annotations

import pytest

from peer.config import PeerConfig
from routing.errors import BadInput


def test_a_region_that_nobody_could_ask_for_is_refused() -> None:
    assert PeerConfig(model="m", region="EU-west").region == "EU-west"
    with pytest.raises(BadInput, match="'my home' is not a region"):
        PeerConfig(model="m", region="my home")
