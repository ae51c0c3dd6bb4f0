"""What a serving peer is told at start. Validated once, here; read from the command line in `__main__.py` alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from peer import devices
from routing.errors import BadInput
from routing.types import Span, parse_region
from swarm.codec import COMPUTE_DTYPES
from swarm.link import Heartbeat
from swarm.quantized import NONE, QUANTIZATIONS

AUTO = devices.AUTO  # the best that is here
QUANTIZE = (NONE, *QUANTIZATIONS, AUTO)


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    model: str
    join: str | None = None  # None: begin a new swarm
    blocks: Span | None = None  # None: what the swarm lacks most, as much as fits
    most_blocks: int | None = None  # None: as many as fit
    rebalance_s: float = 120.0  # without `blocks`: look as often, about, whether others need this peer more; 0: never
    host: str = "0.0.0.0"  # address to listen on, of the data plane and of the DHT
    port: int = 0  # data plane; 0: the system chooses
    dht_port: int = 0
    announce: tuple[str, ...] = ()  # addresses to tell others instead of this machine's own
    dtype: str = "float32"
    quantize: str = NONE  # of the weights of linear layers; auto: see peer/quantizing.py
    region: str = ""  # the data region that others are told; empty: none
    device: str = AUTO  # then what was found; several have commas between
    threads: int | None = None  # cores for computing; None: all, or a share beside other peers on the machine
    nice: bool = False  # computing gives way to whatever else the machine has to do
    cache_bytes: int | None = None  # None: half of what is free after loading
    max_memory_bytes: int | None = None  # for weights and cache together; None: what is free
    model_cache_bytes: int = 64 << 30  # on the disk, for models from other peers; unused for longest goes first
    identity_path: Path | None = None  # None: the first of this user's that is not in use
    first_s: float = 10.0  # blocks that are loaded by then are served, while the others load
    direct: bool = True  # False: only streams through the swarm's own network
    renew_s: float = 15.0
    startup_timeout_s: float = 120.0
    daemon: str | None = None  # another p2pd executable
    metrics_port: int | None = None  # for Prometheus; 0: the system chooses; None: no metrics
    metrics_host: str = "127.0.0.1"  # whoever can reach it can read them
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", ",".join(devices.choose_devices(self.device)))
        if self.dtype not in COMPUTE_DTYPES:
            raise BadInput(f"dtype {self.dtype!r} is not known; choose one of {', '.join(COMPUTE_DTYPES)}")
        if self.quantize not in QUANTIZE:
            raise BadInput(f"quantization {self.quantize!r} is not known; choose one of {', '.join(QUANTIZE)}")
        if self.region:
            parse_region(self.region)
        if self.threads is not None and self.threads < 1:
            raise BadInput(f"threads must be at least 1, not {self.threads}")
        ports = ("port", self.port), ("dht_port", self.dht_port), ("metrics_port", self.metrics_port or 0)
        for name, port in ports:
            if not 0 <= port < 65536:
                raise BadInput(f"{name} must be between 0 and 65535, not {port}")
        if self.cache_bytes is not None and self.cache_bytes < 1 << 20:
            raise BadInput("the cache needs at least 1 MiB")
        if self.max_memory_bytes is not None and self.max_memory_bytes < 1 << 20:
            raise BadInput("a peer needs at least 1 MiB of memory")
        if self.most_blocks is not None and self.most_blocks < 1:
            raise BadInput(f"a peer serves at least one block, not {self.most_blocks}")
        if not 0 <= self.rebalance_s < 1e6:
            raise BadInput(f"rebalance_s is some seconds, or 0 for never; not {self.rebalance_s}")
        if not 1 <= self.renew_s <= 15:
            raise BadInput("records must be renewed every 1 to 15 seconds")

    @property
    def devices(self) -> tuple[str, ...]:
        """That have the blocks, in this order."""
        return tuple(self.device.split(","))

    @property
    def torch_dtype(self) -> torch.dtype:
        return COMPUTE_DTYPES[self.dtype]
