"""Which devices a peer computes on, and what is wrong with one when torch fails."""

from __future__ import annotations

import errno

import torch

from routing.errors import BadInput, DeviceLost, NoSuchDevice, NotEnoughMemory, SwarmError

AUTO = "auto"


def choose_devices(wanted: str) -> tuple[str, ...]:
    """`wanted`, one or several separated by commas, if they are here; for `auto` all of CUDA, else MPS, else the CPU.
    Raises BadInput (no name of a device, or one device twice), NoSuchDevice."""
    cuda, mps = torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.backends.mps.is_available()
    if wanted == AUTO:
        several = tuple(f"cuda:{index}" for index in range(cuda))
        return several if cuda > 1 else ("cuda" if cuda else "mps" if mps else "cpu",)
    here = {"cpu": 1, "cuda": cuda, "mps": int(mps)}
    names = tuple(name.strip() for name in wanted.split(","))
    devices = [_device(name, here) for name in names]
    for index, device in enumerate(devices):
        # The processor may be several devices, with a part of the memory and of the cores each.
        if device in devices[:index] and device.type != "cpu":
            raise BadInput(f"the device {names[index]} is named twice", advice="Name each device once.")
    return names


def _device(name: str, here: dict[str, int]) -> torch.device:
    """With its index. `here`: how many there are of each kind."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in here:
        advice = "Use auto, cpu, cuda, cuda:N or mps, or several of them with commas between."
        raise BadInput(f"{name!r} is not a device", advice=advice)
    number = here[device.type]
    if (device.index or 0) >= number:
        of_kind = f": {number} of its kind are here" if number else ""
        raise NoSuchDevice(f"this machine has no device {name}{of_kind}")
    return torch.device(device.type, device.index or 0)


def make_current(device: torch.device | str) -> None:
    """For this thread: libraries' kernels run on the current device, wherever their tensors lie."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)


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
