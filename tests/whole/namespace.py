"""A network namespace for a test: a host of its own, whose only way out is a wire that the test listens to."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

GATEWAY, HOST = "192.0.2.1", "192.0.2.2"  # TEST-NET-1 (RFC 5737): nobody's real address
ETH_P_ALL = 0x0003
IPV4, ARP, IPV6 = 0x0800, 0x0806, 0x86DD


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def why_not() -> str | None:
    """Why namespaces cannot be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    probe = f"swarmtest{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=False, capture_output=True)
    return None


class Namespace:
    def __init__(self, name: str):
        self.name = name

    def run(self, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """In a process group of its own, ended whole if it takes too long."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            out, err = process.communicate()
            raise AssertionError(f"not done within {timeout_s:g} s\n{out}\n{err}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def python(self, script: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        return self.run([sys.executable, "-c", script], timeout_s)


@contextmanager
def namespace(suffix: str) -> Iterator[Namespace]:
    """With loopback up, and nothing else."""
    name = f"swarm{os.getpid()}{suffix}"
    ip("netns", "add", name)
    try:
        ip("-n", name, "link", "set", "lo", "up")
        yield Namespace(name)
    finally:
        ip("netns", "del", name)


class Wire:
    """The other end of the namespace's default route. `heard` tells what came out so far."""

    def __init__(self, device: str):
        # Without a protocol it hears nothing before it is bound to the device: not this machine's other packets.
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self._socket.bind((device, ETH_P_ALL))
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        """Packets that a program sent: IPv4 ones and questions for the gateway, not the kernel's own IPv6 chatter."""
        packets = []
        while True:
            try:
                frame = self._socket.recv(2048)
            except BlockingIOError:
                return packets
            kind = int.from_bytes(frame[12:14], "big")
            if kind == IPV4:
                packets.append(f"IPv4 to {socket.inet_ntoa(frame[30:34])}, protocol {frame[23]}")
            elif kind == ARP:
                packets.append(f"ARP for {socket.inet_ntoa(frame[38:42])}")
            elif kind == IPV6 and frame[20] in (6, 17):
                packets.append(f"IPv6 to {socket.inet_ntop(socket.AF_INET6, frame[38:54])}, protocol {frame[20]}")

    def close(self) -> None:
        self._socket.close()


@contextmanager
def captured(host: Namespace) -> Iterator[Wire]:
    """Give the namespace a default route into a wire that only listens."""
    outside, inside = f"swo{os.getpid()}", f"swi{os.getpid()}"
    ip("link", "add", outside, "type", "veth", "peer", "name", inside)
    try:
        ip("link", "set", inside, "netns", host.name)
        ip("addr", "add", f"{GATEWAY}/24", "dev", outside)
        ip("link", "set", outside, "up")
        ip("-n", host.name, "addr", "add", f"{HOST}/24", "dev", inside)
        ip("-n", host.name, "link", "set", inside, "up")
        ip("-n", host.name, "route", "add", "default", "via", GATEWAY)
        wire = Wire(outside)
        try:
            yield wire
        finally:
            wire.close()
    finally:
        subprocess.run(["ip", "link", "del", outside], check=False, capture_output=True)
