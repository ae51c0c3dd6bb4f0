"""What a serving peer is told at start. Validated once, here; read from the command line in `__main__.py` alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from peer.devices import AUTO, choose_device
from routing.errors import BadInput
from routing.types import Span, parse_region
from swarm.codec import COMPUTE_DTYPES
from swarm.link import Heartbeat


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    model: str
    join: str | None = None  # None: begin a new swarm
    blocks: Span | None = None  # None: the least covered span that fits
    host: str = "0.0.0.0"  # address to listen on, of the data plane and of the DHT
    port: int = 0  # data plane; 0: the system chooses
    dht_port: int = 0
    announce: tuple[str, ...] = ()  # addresses to tell others instead of this machine's own
    dtype: str = "float32"
    region: str = ""  # the data region that others are told; empty: none
    device: str = AUTO  # then the one that was found
    threads: int | None = None  # cores for computing; None: all, or a share beside other peers on the machine
    nice: bool = False  # computing gives way to whatever else the machine has to do
    cache_bytes: int | None = None  # None: half of what is free after loading
    max_memory_bytes: int | None = None  # for weights and cache together; None: what is free
    identity_path: Path | None = None  # None: the first of this user's that is not in use
    direct: bool = True  # False: only streams through the swarm's own network
    renew_s: float = 15.0
    startup_timeout_s: float = 120.0
    daemon: str | None = None  # another p2pd executable
    metrics_port: int | None = None  # for Prometheus; 0: the system chooses; None: no metrics
    metrics_host: str = "127.0.0.1"  # whoever can reach it can read them
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", choose_device(self.device))
        if self.dtype not in COMPUTE_DTYPES:
            raise BadInput(f"dtype {self.dtype!r} is not known; choose one of {', '.join(COMPUTE_DTYPES)}")
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
        if not 1 <= self.renew_s <= 15:
            raise BadInput("records must be renewed every 1 to 15 seconds")

    @property
    def torch_dtype(self) -> torch.dtype:
        return COMPUTE_DTYPES[self.dtype]
