"""A model that is not on this disk, from peers of the swarm that have it: only what is served here, each tensor
compared with the swarm's manifest before it is kept.

What is kept are the lender's own files with holes where nothing was fetched, so they are opened and read as any other
checkpoint. They lie in a folder named by the swarm's fingerprint, shared by all peers of this user; a hole differs from
the manifest and is fetched.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from routing.errors import DamagedWeights, ModelError, ProtocolError, StartError, SwarmError, Unreachable, WrongModel
from routing.types import PeerId
from swarm.checkpoint import Checkpoint, open_checkpoint
from swarm.lending import LISTING_BYTES, PART_BYTES, PIECE_BYTES, PROTOCOL, STALL_S, Listed, Wanted
from swarm.manifest import Manifest, config_hash, digest_as
from swarm.progress import Progress

MOST_HEAD_BYTES = 128 << 20
MOST_FILE_BYTES = 1 << 42
MOST_TENSOR_BYTES = 16 << 30
SUFFIXES = (".json", ".safetensors", ".gguf")
TRIES = 3  # of a stream that breaks off before anything came
AT_ONCE = 4


class Opens(Protocol):
    async def open(
        self, peer_id: PeerId, protocol: str, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]: ...


class Borrower:
    """`folder`: of this model alone."""

    def __init__(self, streams: Opens, manifest: Manifest, folder: Path):
        self._streams, self._manifest, self._folder = streams, manifest, folder

    async def open_model(self, peers: Sequence[PeerId], cache_dir: Path) -> Checkpoint:
        """The configuration and what tensors there are; of their bytes none need be here. Raises ModelError,
        WrongModel, StartError (nothing can be kept) or what the last of `peers` was asked in vain with."""
        problem: SwarmError = Unreachable("no peer is known that could give the model")
        with suppress(ModelError, WrongModel):
            return await asyncio.to_thread(self._open, self._folder, cache_dir)
        for peer_id in peers:
            with _kept_in(self._folder.parent):
                fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=self._folder.parent))
            try:
                for listed in await self._listing(peer_id):
                    await self._head(peer_id, listed, fresh)
                await asyncio.to_thread(self._open, fresh, cache_dir)
                shutil.rmtree(self._folder, ignore_errors=True)  # what could not be opened
                with suppress(OSError):  # another process was first
                    os.rename(fresh, self._folder)
                return await asyncio.to_thread(self._open, self._folder, cache_dir)
            except SwarmError as error:
                problem = error
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
        raise problem

    async def fetch(
        self, checkpoint: Checkpoint, lenders: Mapping[str, Sequence[PeerId]], progress: Progress
    ) -> None:
        """Each tensor named, from any of its lenders; what is here already is not fetched. Progress is in bytes, and so
        is what is kept. Raises DamagedWeights (all lenders gave other bytes), Unreachable, StartError (no room)."""
        sizes = {name: 0 for name in lenders}
        at_once, done = asyncio.Semaphore(AT_ONCE), 0
        for name, peers in lenders.items():
            await self._need_header(checkpoint, name, peers)
            sizes[name] = checkpoint.nbytes(name)
        total = sum(sizes.values())

        async def one(name: str) -> None:
            nonlocal done
            async with at_once:
                await self._tensor(checkpoint, name, lenders[name])
            done += sizes[name]
            progress("weights from other peers", done, total)

        try:
            async with asyncio.TaskGroup() as group:
                for name in lenders:
                    group.create_task(one(name))
        except* DamagedWeights as errors:
            # Or the headers that came are wrong: then no lender could give what they ask for.
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            raise _first(errors) from None
        except* SwarmError as errors:
            raise _first(errors) from None

    def _open(self, folder: Path, cache_dir: Path) -> Checkpoint:
        file = next(iter(folder.glob("*.gguf")), folder)
        checkpoint = open_checkpoint(str(file), cache_dir=cache_dir)
        if config_hash(checkpoint.config) != self._manifest.config_hash:
            raise WrongModel("the configuration that came is not that of the swarm's model")
        return checkpoint

    async def _listing(self, peer_id: PeerId) -> list[Listed]:
        """Raises ProtocolError, Unreachable."""
        reader, writer = await self._ask(peer_id, Wanted("", 0, 0))
        try:
            data = bytearray()
            async with asyncio.timeout(STALL_S):
                while len(data) < LISTING_BYTES and (piece := await reader.read(LISTING_BYTES)):
                    data += piece
            files = msgspec.json.decode(data, type=list[Listed])
        except (msgspec.DecodeError, UnicodeDecodeError, OSError, TimeoutError) as error:
            raise Unreachable(f"{peer_id} does not say what it has: {error!r}") from None
        finally:
            writer.close()
        for file in files:
            plain = Path(file.name).name == file.name and Path(file.name).suffix in SUFFIXES
            if not plain or not 0 < file.head <= min(file.nbytes, MOST_HEAD_BYTES) or file.nbytes > MOST_FILE_BYTES:
                raise ProtocolError(f"{peer_id} offers {file}, which cannot be part of a model")
        if not files or sum(file.head for file in files) > MOST_HEAD_BYTES:
            raise ProtocolError(f"{peer_id} offers {len(files)} files, which cannot be a model")
        return files

    async def _head(self, peer_id: PeerId, file: Listed, folder: Path) -> None:
        data = await self._range(peer_id, file.name, 0, file.head)
        await asyncio.to_thread(_write, folder / file.name, 0, data, file.nbytes)

    async def _need_header(self, checkpoint: Checkpoint, name: str, peers: Sequence[PeerId]) -> None:
        """Of the file that holds the tensor: who lent the others may not have had it."""
        path = checkpoint.file_of(name)
        if path.is_file():
            return
        problem: SwarmError = Unreachable(f"no peer serves what {path.name} is needed for")
        for peer_id in peers:
            try:
                for listed in await self._listing(peer_id):
                    if listed.name == path.name:
                        await self._head(peer_id, listed, path.parent)
                        return
            except SwarmError as error:
                problem = error
        raise problem

    async def _tensor(self, checkpoint: Checkpoint, name: str, peers: Sequence[PeerId]) -> None:
        wanted, form = self._manifest.tensors.get(name), checkpoint.form(name)
        if wanted is None:
            raise WrongModel(f"the swarm's model has no {name}")
        if digest_as(await asyncio.to_thread(checkpoint.raw_digest, name), form) == wanted:
            return
        file, start, nbytes = checkpoint.place(name)
        if nbytes > MOST_TENSOR_BYTES:
            raise ProtocolError(f"{name} is said to have {nbytes} bytes")
        problem: SwarmError = Unreachable(f"no peer serves what {name} is needed for")
        for peer_id in peers:
            try:
                data = await self._range(peer_id, file.name, start, nbytes)
            except SwarmError as error:
                problem = error
                continue
            if digest_as(await asyncio.to_thread(_digest, data), form) == wanted:
                await asyncio.to_thread(_write, file, start, data)
                return
            problem = DamagedWeights(
                f"{name} as {peer_id} gives it differs from the swarm's manifest",
                advice="Its copy is damaged, or it lies; try again when other peers serve the block.",
            )
        raise problem

    async def _range(self, peer_id: PeerId, file: str, start: int, nbytes: int) -> bytearray:
        """Part by part; a stream that breaks off goes on from where it was. Raises Unreachable."""
        data, vain = bytearray(), 0
        while len(data) < nbytes:
            before = len(data)
            try:
                await self._part(peer_id, Wanted(file, start + before, min(nbytes - before, PART_BYTES)), data)
            except (OSError, EOFError, TimeoutError, SwarmError) as error:
                vain = 0 if len(data) > before else vain + 1
                if vain == TRIES:
                    at = start + before
                    raise Unreachable(f"{file} from {peer_id}: broken off at byte {at} ({error!r})") from None
        return data

    async def _part(self, peer_id: PeerId, wanted: Wanted, data: bytearray) -> None:
        """Appends to `data` what comes, also if it breaks off. Raises EOFError, OSError, TimeoutError, SwarmError."""
        reader, writer = await self._ask(peer_id, wanted)
        try:
            left = wanted.nbytes
            while left:
                async with asyncio.timeout(STALL_S):
                    piece = await reader.read(min(left, PIECE_BYTES))
                if not piece:
                    raise EOFError("the stream ended")
                data += piece
                left -= len(piece)
        finally:
            writer.close()

    async def _ask(self, peer_id: PeerId, wanted: Wanted) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self._streams.open(peer_id, PROTOCOL, STALL_S)
        request = msgspec.json.encode(wanted)
        writer.write(len(request).to_bytes(4, "little") + request)
        return reader, writer


def _first(errors: BaseExceptionGroup[SwarmError]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def models_dir(cache_dir: Path) -> Path:
    return cache_dir / "models"


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """While `folder` is in use, by any number of processes, `make_room` leaves it. Raises StartError."""
    with _kept_in(folder.parent):
        lock = os.open(_lock_of(folder), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.utime(lock)
        yield
    finally:
        os.close(lock)


def make_room(root: Path, most_bytes: int) -> None:
    """Removes models, those unused for longest first, until what is left takes at most `most_bytes`."""
    folders = [folder for folder in root.iterdir() if folder.is_dir()] if root.is_dir() else []
    sizes = {folder: sum(file.stat().st_blocks * 512 for file in folder.iterdir()) for folder in folders}
    for folder in sorted(folders, key=_last_used):
        if sum(sizes.values()) <= most_bytes:
            return
        lock = os.open(_lock_of(folder), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            del sizes[folder]
        except BlockingIOError:
            continue  # somebody serves it
        finally:
            os.close(lock)


def _lock_of(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.lock"


def _last_used(folder: Path) -> float:
    lock = _lock_of(folder)
    return lock.stat().st_mtime if lock.exists() else 0.0


def _write(path: Path, start: int, data: bytes | bytearray, size: int | None = None) -> None:
    """`size`: of the file, with a hole after `data`. Raises StartError."""
    with _kept_in(path.parent):
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "r+b") as stream:
            stream.seek(start)
            stream.write(data)
            if size is not None:
                stream.truncate(size)


@contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    """`folder` is there, and whatever of the disk fails is a StartError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise StartError(
            f"the weights cannot be kept in {folder}: {error.strerror}",
            advice="See that it has room and may be written, or set HOME to another folder.",
        ) from error


def _digest(data: bytearray) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
