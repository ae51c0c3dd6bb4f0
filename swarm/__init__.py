"""Moves bytes: wire, transport, discovery, checkpoints, client sessions, generation, command line.

The public names: `SwarmModel` (asynchronous; `swarm.sync.SwarmModel` blocks), `LocalSwarm`, `SwarmError` and its kin
in `routing.errors`.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from routing.errors import SwarmError
from swarm.late import hold_back

if TYPE_CHECKING:
    from swarm.local import LocalSwarm
    from swarm.model import SwarmModel

__all__ = ["LocalSwarm", "SwarmError", "SwarmModel"]

# tqdm, which transformers imports, says so in a Jupyter without ipywidgets; nothing here shows such bars.
warnings.filterwarnings("ignore", message="IProgress not found")

hold_back("hivemind")  # before any module imports a part of it

_HOMES = {"SwarmModel": "swarm.model", "LocalSwarm": "swarm.local"}


def __getattr__(name: str) -> Any:
    # Late, so that `swarm --help` does not wait for torch.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'swarm' has no attribute {name!r}")
