"""On a machine of its own: nothing speaks to a host outside the swarm, and IPv6 alone is enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.whole.namespace import HOST, captured, ip, namespace, why_not

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

REACH_OUT = "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'?', ('198.51.100.1', 53))"

SCRIPT = """
import asyncio, json, sys
from swarm import LocalSwarm, SwarmModel

async def main():
    async with LocalSwarm({model!r}, ["0:3", "3:6"], host={host!r}) as swarm:
        async with SwarmModel.connect({model!r}, join=swarm.join_code, threads=1) as model:
            ids = [token.id async for token in model.generate("Hello", max_new_tokens=8, ignore_eos=True)]
    print(json.dumps(dict(ids=ids, addresses=[peer.facts["address"] for peer in swarm.peers])))

asyncio.run(main())
"""


def test_a_swarm_speaks_to_nobody_outside_it(tiny: Path) -> None:
    """All interfaces, and a default route: a private LAN must not see a packet for a public host, not even a
    question for the gateway."""
    with namespace("a") as host, captured(host) as wire:
        done = host.python(SCRIPT.format(model=str(tiny), host="0.0.0.0"), 120)
        assert done.returncode == 0, done.stderr
        assert wire.heard() == []
        # Only now: the kernel asks for the gateway again long after a packet.
        assert host.python(REACH_OUT, 30).returncode == 0
        assert wire.heard(), "the wire hears nothing at all: this test proves nothing"
    said = json.loads(done.stdout.splitlines()[-1])
    assert all(address.startswith(HOST) for address in said["addresses"])
    assert len(said["ids"]) == 8


def test_ipv6_alone_is_enough(tiny: Path) -> None:
    with namespace("b") as host:
        ip("-n", host.name, "addr", "del", "127.0.0.1/8", "dev", "lo")
        done = host.python(SCRIPT.format(model=str(tiny), host="::1"), 120)
        assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert all(address.startswith("[::1]:") for address in said["addresses"])
    assert len(said["ids"]) == 8
