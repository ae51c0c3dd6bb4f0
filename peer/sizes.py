"""Sizes as people write them: `4G`."""

from __future__ import annotations

import re

from routing.errors import BadInput

SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes; K, M, G and T are powers of 1024. Raises BadInput."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadInput(f"{text!r} is not a size", advice="Write a number of bytes, as 4G, 1.5G or 900M.")
    return int(float(match[1]) * SUFFIXES[match[2].upper()])
