"""Which device a peer computes on."""

from __future__ import annotations

import torch

from routing.errors import BadInput, NoSuchDevice

AUTO = "auto"


def choose_device(wanted: str) -> str:
    """`wanted` if it is here; for `auto` CUDA, else MPS, else the CPU. Raises BadInput (no name of a device),
    NoSuchDevice."""
    cuda, mps = torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.backends.mps.is_available()
    if wanted == AUTO:
        return "cuda" if cuda else "mps" if mps else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise BadInput(f"{wanted!r} is not a device", advice="Use auto, cpu, cuda, cuda:N or mps.")
    here = {"cpu": 1, "cuda": cuda, "mps": int(mps)}[device.type]
    if (device.index or 0) >= here:
        raise NoSuchDevice(f"this machine has no device {wanted}" + (f": {here} of its kind are here" if here else ""))
    return wanted
