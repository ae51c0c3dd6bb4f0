"""Which device a peer computes on, and what is wrong with it when torch fails."""

from __future__ import annotations

import errno

import torch

from routing.errors import BadInput, DeviceLost, NoSuchDevice, NotEnoughMemory, SwarmError

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


def failure(error: Exception, device: torch.device | str, name: str | None = None) -> SwarmError | None:
    """What stands behind an error of computing, if it is the machine's: NotEnoughMemory, or DeviceLost, which is found
    out by computing something else. `name`: of the device, where that alone does not tell which it is."""
    if _is_of_memory(error):
        return NotEnoughMemory(f"the memory of {name or device} is not enough: {_first_line(error)}")
    if isinstance(error, RuntimeError) and not computes(device):
        return DeviceLost(f"{name or device} does not compute any more: {_first_line(error)}")
    return None


def computes(device: torch.device | str) -> bool:
    """Whether it does. One that has failed as a whole refuses the least task."""
    try:
        return torch.ones(2, device=device).sum().item() == 2
    except RuntimeError:
        return False


def _is_of_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # On a CPU torch has no class of its own for it.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _first_line(error: Exception) -> str:
    """Torch's further lines are advice for its own developers."""
    return (str(error).splitlines() or [type(error).__name__])[0]
