"""A TCP connection to an address that others told, and in few words why there is none.

Knows no frame and no handshake. Looks up no name.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import ssl

from routing.reach import NO_WAY, REFUSED, TIMED_OUT
from swarm.channel import parse_address

_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)


async def connected(address: str) -> socket.socket:
    """Raises BadInput, ValueError, OSError. Apart from TLS: who took our connection may just be slow."""
    host, port = parse_address(address)
    # Addresses come from others: nobody makes us look up a name.
    version = ipaddress.ip_address(host).version
    raw = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, (host, port))
    except BaseException:
        raw.close()
        raise
    return raw


def plainly(error: Exception) -> str:
    """The usual reasons in words that need no manual; others as they are."""
    match error:
        case ConnectionRefusedError():
            return REFUSED
        case TimeoutError():
            return TIMED_OUT
        case ssl.SSLError():
            return f"no secure connection: {error}"
        case OSError() if error.errno in _NO_WAY:
            return NO_WAY
    return str(error)
