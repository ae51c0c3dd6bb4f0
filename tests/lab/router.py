"""The router of the network lab, a process of its own: `python -m tests.lab.router`, told by JSON lines what to do.

Each host is a network namespace with one TUN device; the router reads every packet of every host and hands it on after
the delay of that direction, through the sender's uplink rate, or drops it. (The usual tool, netem, is a kernel module
that not every kernel has.) Ends, and takes the hosts down, when its standard input closes, however its parent ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
QUEUE_PACKETS = 10_000  # of a device
READ_AT_ONCE = 64
LARGEST_PACKET = 65_536
IPV4 = 4


@dataclass(slots=True)
class Link:
    """One direction between two hosts."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0  # added to it at random, evenly; packets stay in order
    loss: float = 0.0  # share of packets
    cut: bool = False
    last_at: float = 0.0  # when the last packet arrives


KNOBS = frozenset(field.name for field in fields(Link)) - {"last_at"}


def address(host: int, subnet: str) -> str:
    return f"{subnet}.{host}"


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)


class Router:
    """Hosts are numbered from 1."""

    def __init__(self, hosts: int, prefix: str, subnet: str, mtu: int, seed: int):
        self.hosts, self.prefix, self.subnet, self.mtu = range(1, hosts + 1), prefix, subnet, mtu
        self.links = {(a, b): Link() for a in self.hosts for b in self.hosts}
        self.uplink_bytes_s = dict.fromkeys(self.hosts, 0.0)  # 0: no limit
        self.uplink_free_at = dict.fromkeys(self.hosts, 0.0)
        self.random = random.Random(seed)
        self.devices: dict[int, int] = {}
        self.dropped = 0

    def up(self) -> None:
        for host in self.hosts:
            namespace, device = f"{self.prefix}{host}", f"{self.prefix}t{host}"
            ip("netns", "add", namespace)
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self.devices[host] = fd
            fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
            ip("link", "set", device, "netns", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
            ip("-n", namespace, "addr", "add", f"{address(host, self.subnet)}/24", "dev", device)
            ip("-n", namespace, "link", "set", device, "mtu", str(self.mtu), "txqueuelen", str(QUEUE_PACKETS), "up")

    def down(self) -> None:
        for host in self.hosts:
            if host in self.devices:
                os.close(self.devices[host])
            ip("netns", "del", f"{self.prefix}{host}", check=False)

    def change(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """`links`: [from, to] each; the knobs given are set. `rate`: [host, bytes a second]."""
        for source, target in what.get("links", ()):
            link = self.links[source, target]
            for knob in KNOBS & what.keys():
                setattr(link, knob, what[knob])
        if "rate" in what:
            host, bytes_s = what["rate"]
            self.uplink_bytes_s[host] = bytes_s
        return {"dropped": self.dropped}

    def packets_from(self, loop: asyncio.AbstractEventLoop, source: int) -> None:
        for _ in range(READ_AT_ONCE):
            try:
                packet = os.read(self.devices[source], LARGEST_PACKET)
            except BlockingIOError:
                return
            if packet[0] >> 4 != IPV4 or packet[19] not in self.devices:
                continue
            target = packet[19]  # the last byte of the destination
            link = self.links[source, target]
            if link.cut or (link.loss and self.random.random() < link.loss):
                self.dropped += 1
                continue
            leaves = loop.time()
            if rate := self.uplink_bytes_s[source]:
                leaves = max(self.uplink_free_at[source], leaves) + len(packet) / rate
                self.uplink_free_at[source] = leaves
            delay_s = (link.delay_ms + link.jitter_ms * self.random.random()) / 1e3
            link.last_at = max(link.last_at, leaves + delay_s)
            loop.call_at(link.last_at, self.deliver, link, target, packet)

    def deliver(self, link: Link, target: int, packet: bytes) -> None:
        if link.cut:  # what is under way when a link is cut is lost
            self.dropped += 1
            return
        with contextlib.suppress(OSError):  # a full queue drops, as a real link does
            os.write(self.devices[target], packet)

    async def serve(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        for host, fd in self.devices.items():
            loop.add_reader(fd, self.packets_from, loop, host)
        requests = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
        say({"event": "up"})

        async def obey() -> None:
            while line := await requests.readline():
                say(self.change(json.loads(line)))
            ended.set()

        async with asyncio.TaskGroup() as group:
            task = group.create_task(obey())
            await ended.wait()
            task.cancel()


def say(facts: Mapping[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


def main(settings: str) -> None:
    router = Router(**json.loads(settings))
    try:
        router.up()
        asyncio.run(router.serve())  # not uvloop, whose timers count whole milliseconds
    finally:
        router.down()


if __name__ == "__main__":
    main(sys.argv[1])
