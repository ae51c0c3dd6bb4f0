"""A checkpoint of each family, for the tests of blocks."""

from __future__ import annotations

import pytest

from swarm.checkpoint import open_checkpoint
from tests.tiny import FAMILIES, make_tiny


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    return open_checkpoint(str(make_tiny(request.param, tmp_path_factory.mktemp(request.param))))
