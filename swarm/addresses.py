"""Under which addresses others may reach a socket that listens on this machine. Asks no host for its opinion."""

from __future__ import annotations

import ipaddress
import socket

import psutil

MOST_ADDRESSES = 4  # a record in the DHT is small


def local_addresses(listening: str) -> tuple[str, ...]:
    """`"0.0.0.0:4001"` to this machine's own addresses with that port, the widest reaching first.

    An address that is not a wildcard stands for itself. Loopback is told only where there is nothing else.
    """
    host, _, port = listening.rpartition(":")
    address = ipaddress.ip_address(host.strip("[]"))
    if not address.is_unspecified:
        return (listening,)
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    found = [ipaddress.ip_address(e.address) for e in entries if e.family is family and "%" not in e.address]
    usable = [a for a in found if not (a.is_loopback or a.is_link_local)]
    ordered = sorted(usable, key=lambda a: (not a.is_global, str(a))) or [a for a in found if a.is_loopback]
    return tuple(f"[{a}]:{port}" if a.version == 6 else f"{a}:{port}" for a in ordered[:MOST_ADDRESSES])
