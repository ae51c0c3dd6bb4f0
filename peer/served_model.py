"""The model of a node: its files, on this disk or other peers', whether they are the swarm's, and what its blocks take.

Owns which quantization it is served in. Knows no swarm's view, no block in memory and no session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import torch

from peer.blocks import Blocks, Loading, estimated_block_bytes
from peer.borrowed import Borrowed
from peer.capacity import Memory, Speed, measure
from peer.config import PeerConfig
from peer.loading import Check
from peer.measured import kept_decode_s, machine_setting, measured, setting_of
from peer.quantizing import choose
from peer.spread import AnyLoading, SpreadLoading
from routing.errors import BadInput, ModelNotFound
from routing.types import PeerRecord, Span
from swarm import manifest as manifests
from swarm.checkpoint import Checkpoint, open_checkpoint
from swarm.client import fetch_manifest
from swarm.compute import ComputeThread
from swarm.families import Family, family_of, text_config
from swarm.hive import Hive
from swarm.joincode import JoinCode
from swarm.progress import Progress
from swarm.quantized import NONE

JOIN_S = 30.0


class ServedModel:
    def __init__(self, config: PeerConfig, progress: Progress):
        self._config, self._progress = config, progress
        self.checkpoint: Checkpoint
        self.family: Family
        self.n_blocks = 0
        self.manifest: manifests.Manifest | None = None
        self.fingerprint = b""  # of the swarm
        self._quantization = NONE
        self._unchecked: list[str] = []  # tensors that were loaded before the manifest was there
        self._absent: ModelNotFound | None = None
        self._borrowed: Borrowed | None = None

    async def open(self, thread: ComputeThread, *, others_may_have_it: bool) -> bool:
        """Whether it is on this disk. Raises ModelNotFound where it must be."""
        try:
            self._use(await asyncio.to_thread(open_checkpoint, self._config.model, progress=self._progress))
        except ModelNotFound as error:
            if not others_may_have_it:
                raise
            self._absent = error
            return False
        await self._choose_quantization(thread)
        return True

    async def found(self) -> None:
        """Begin a swarm: the whole checkpoint is here, and its manifest names the swarm."""
        self.manifest = await asyncio.to_thread(manifests.build, self.checkpoint, self._progress)
        self.fingerprint = manifests.fingerprint(self.manifest)

    async def join(self, hive: Hive, join: JoinCode, thread: ComputeThread, stack: AsyncExitStack) -> None:
        """The manifest of that swarm, and the model from its peers if it is not here. Raises what `fetch_manifest` and
        `Borrowed.open_model` raise."""
        self.manifest = await fetch_manifest(hive, join, JOIN_S)
        if self._absent is not None:
            self._borrowed = Borrowed(hive, join, self.manifest, self._absent, self._config.model_cache_bytes)
            self._use(await self._borrowed.open_model(stack))
            await self._choose_quantization(thread)

    def _use(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.family = family_of(checkpoint.config)
        self.n_blocks = self.family.n_blocks(text_config(checkpoint.config))

    async def _choose_quantization(self, thread: ComputeThread) -> None:
        self._quantization = await choose(self._config, self.checkpoint.config, self.family, thread)

    @property
    def dtype(self) -> str:
        """As records state it."""
        dtype = self._config.dtype
        return dtype if self._quantization == NONE else f"{dtype}/{self._quantization}"

    # -- its blocks ------------------------------------------------------------------------------------------

    def wanted(self) -> Span | None:
        """Those that the owner asked for. Raises BadInput (there are none such)."""
        wanted = self._config.blocks
        if wanted is not None and wanted.end > self.n_blocks:
            raise BadInput(f"there are no blocks {wanted}: the model has {self.n_blocks}")
        return wanted

    def block_bytes(self) -> int:
        """Of the greatest of some blocks, in memory."""
        config, some = self.checkpoint.config, range(0, self.n_blocks, max(1, self.n_blocks // 4))
        dtype, quantization = self._config.torch_dtype, self._quantization
        return max(estimated_block_bytes(config, self.family, i, dtype, quantization) for i in some)

    @property
    def is_borrowed(self) -> bool:
        """Whether weights come from other peers."""
        return self._borrowed is not None

    async def fetch(self, span: Span, records: Iterable[PeerRecord]) -> None:
        """The weights of `span` from other peers. Raises what `Borrowed.fetch` raises."""
        assert self._borrowed is not None
        await self._borrowed.fetch(self.checkpoint, self.family, span, records, self._progress)

    def check(self, names: Sequence[str]) -> None:
        """Tensors of a swarm that was joined must be those of its manifest; a founder's have just made it. Until it is
        there they are put down, to be checked then. Raises WrongModel, DamagedWeights."""
        if self.manifest is None:
            self._unchecked += names
        else:
            manifests.check(self.checkpoint, names, self.manifest)

    async def check_rest(self) -> None:
        """What was loaded before the manifest was there: nobody is served before."""
        await asyncio.to_thread(self.check, self._unchecked)

    def begin_loading(self, span: Span, check: Check | None, memory: Memory) -> AnyLoading:
        """`memory`: what is free on each device, where there are several."""

        def on(part: Span, device: str) -> Loading:
            dtype, quantization = self._config.torch_dtype, self._quantization
            source = self.checkpoint, self.family, part, dtype, device, self._progress
            return Loading(*source, quantization=quantization, check=check)

        devices = self._config.devices
        if len(devices) == 1:
            return on(span, devices[0])
        return SpreadLoading(on, span, devices, memory.shares(len(span), self.block_bytes()))

    # -- its speed here --------------------------------------------------------------------------------------

    def measured(self, blocks: Blocks) -> Speed:
        """Of a block; on the compute thread of its device."""
        return measured(blocks, setting_of(blocks, self.fingerprint, self.dtype), self._measurements, measure)

    def kept_decode_s(self) -> float:
        """How fast this machine was when it served some blocks of this model; 0: it never did so."""
        setting = machine_setting(torch.device(self._config.devices[0]), self.fingerprint, self.dtype)
        return kept_decode_s(setting, self._measurements)

    @property
    def _measurements(self) -> Path:
        return self.checkpoint.cache_dir / "measured"
