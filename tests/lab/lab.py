"""A wide-area network on one machine: hosts in network namespaces, with chosen delays, rates, losses and cuts.

    with Lab(hosts=3, delay_ms=20) as lab:               # one way, so a round trip takes 40 ms
        server = subprocess.Popen([*lab.on(2), "python", "server.py"])  # at lab.address(2)
        lab.link(1, 2, delay_ms=80, loss=0.01)
        lab.cut(3)                                       # host 3 falls off the network, silently
        lab.heal(3)

Needs root, iproute2 and /dev/net/tun: `why_not()` says what is missing. Round trips are true to 0.5 ms, and one link
carries some 35 MB/s; the router is one Python process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.lab.router import address
from tests.whole import namespace

ROOT = Path(__file__).resolve().parents[2]
SUBNETS = itertools.count()
END_S = 10.0
ECHO = """
import socket
s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('0.0.0.0', 9)); print('ready', flush=True)
while True:
    data, sender = s.recvfrom(100); s.sendto(data, sender)
"""
ASK = """
import socket, sys, time
s = socket.socket(type=socket.SOCK_DGRAM); s.settimeout(float(sys.argv[3])); times = []
for i in range(int(sys.argv[2])):
    began = time.perf_counter(); s.sendto(b'%d' % i, (sys.argv[1], 9))
    try:
        while s.recv(100) != b'%d' % i: pass
        times.append(1e3 * (time.perf_counter() - began))
    except TimeoutError:
        times.append(-1.0)
print(*times)
"""


def why_not() -> str | None:
    """Why there can be no lab here, or None."""
    return namespace.why_not() or (None if os.access("/dev/net/tun", os.W_OK) else "the lab needs /dev/net/tun")


class Lab:
    def __init__(self, hosts: int, *, delay_ms: float = 0.0, mtu: int = 1500, seed: int = 0):
        """`delay_ms` is one way, between any two. `seed` decides which packets are lost and how they are late."""
        number = next(SUBNETS)
        self.hosts, self.prefix, self.subnet = hosts, f"l{os.getpid() % 1_000_000}x{number}h", f"10.77.{number % 256}"
        self._delay_ms = delay_ms
        self._settings = {"hosts": hosts, "prefix": self.prefix, "subnet": self.subnet, "mtu": mtu, "seed": seed}

    def __enter__(self) -> Lab:
        self._router = subprocess.Popen(
            [sys.executable, "-m", "tests.lab.router", json.dumps(self._settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        assert self._router.stdout is not None
        if not self._router.stdout.readline():
            self._end()
            raise RuntimeError(f"the router did not start: {why_not() or 'it says why above'}")
        self.everywhere(delay_ms=self._delay_ms)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        assert self._router.stdin is not None and self._router.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._router.stdin.close()
        self._router.wait(END_S)
        self._router.stdout.close()

    def address(self, host: int) -> str:
        return address(host, self.subnet)

    def on(self, host: int) -> list[str]:
        """What to put before a command so that it runs there."""
        return ["ip", "netns", "exec", f"{self.prefix}{host}"]

    def round_trips_ms(self, source: int, target: int, count: int = 20, timeout_s: float = 0.5) -> list[float]:
        """Of small packets, as two programs on those hosts see it; -1 for one that got no answer."""
        with subprocess.Popen(
            [*self.on(target), sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True
        ) as echo:
            try:
                assert echo.stdout is not None and echo.stdout.readline() == "ready\n"
                command = [*self.on(source), sys.executable, "-c", ASK]
                command += [self.address(target), str(count), str(timeout_s)]
                asked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
            finally:
                echo.kill()
        return [float(word) for word in asked.stdout.split()]

    # -- links -----------------------------------------------------------------------------------------------

    def link(self, a: int, b: int, *, both: bool = True, **knobs: Any) -> None:
        """Sets what is given of the way from `a` to `b`, and back: delay_ms, jitter_ms, loss, cut."""
        self._change(links=[(a, b), (b, a)] if both else [(a, b)], **knobs)

    def everywhere(self, **knobs: Any) -> None:
        self._change(links=list(itertools.permutations(range(1, self.hosts + 1), 2)), **knobs)

    def cut(self, host: int, *, inward: bool = True, outward: bool = True) -> None:
        """Nothing reaches that host, or comes from it, or both; nobody is told."""
        self._change(links=self._of(host, inward, outward), cut=True)

    def heal(self, host: int) -> None:
        self._change(links=self._of(host, True, True), cut=False)

    def split(self, some: set[int]) -> None:
        """A partition: nothing passes between those and all others. `everywhere(cut=False)` ends it."""
        others = set(range(1, self.hosts + 1)) - some
        pairs = [*itertools.product(some, others), *itertools.product(others, some)]
        self._change(links=pairs, cut=True)

    def rate(self, host: int, mbit_s: float) -> None:
        """Of its uplink; 0 is no limit."""
        self._change(rate=(host, mbit_s * 1e6 / 8))

    @property
    def dropped(self) -> int:
        """Packets lost or cut off so far."""
        return int(self._change()["dropped"])

    def _of(self, host: int, inward: bool, outward: bool) -> list[tuple[int, int]]:
        others = [other for other in range(1, self.hosts + 1) if other != host]
        ways = [(other, host) for other in others] if inward else []
        return ways + ([(host, other) for other in others] if outward else [])

    def _change(self, **what: Any) -> dict[str, Any]:
        assert self._router.stdin is not None and self._router.stdout is not None
        self._router.stdin.write(json.dumps(what) + "\n")
        self._router.stdin.flush()
        return dict(json.loads(self._router.stdout.readline()))
