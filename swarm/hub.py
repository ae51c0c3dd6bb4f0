"""Owns hub ids: the hub's cache on this machine, and fetching just what is needed. Knows no tensors.

The cache is asked first and the hub is not spoken to if it answers. Opening fetches the small files
(configuration, tokenizer, index); a shard is fetched when one of its tensors is first needed, so that a
client never downloads the blocks it does not run.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from routing.errors import ModelNotFound
from swarm.checkpoint import CONFIG, INDEX, SINGLE, DirectoryCheckpoint
from swarm.progress import Progress

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")  # configuration, index, tokenizer, chat template
ANSWER_WITHIN_S = 8.0  # the hub's first answer; name look-up included, which has no limit of its own
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
T = TypeVar("T")


class HubCheckpoint(DirectoryCheckpoint):
    """A snapshot in the hub's cache, whose missing shards are fetched when needed, all of one commit."""

    def __init__(self, repo_id: str, snapshot: Path, *, cache_dir: Path, allow_download: bool, progress: Progress):
        self.repo_id = repo_id
        self._allow_download = allow_download
        self._progress = progress
        super().__init__(snapshot, cache_dir=cache_dir, source=repo_id)

    def _shard(self, file_name: str) -> Path:
        path = self.folder / file_name
        if not path.is_file():
            if not self._allow_download:
                raise _not_cached(self.repo_id, file_name)
            fetch_file(self.repo_id, file_name, self.folder, self._progress)
        return path


def open_hub_checkpoint(
    repo_id: str,
    *,
    cache_dir: Path,
    allow_download: bool,
    progress: Progress,
    hub_cache: Path | None = None,
) -> HubCheckpoint:
    """Opens `org/name`. `hub_cache` is the hub's cache directory; None is the library's own choice.

    Raises ModelNotFound: not in the cache and not to be had, with the reason.
    """
    snapshot = _cached_snapshot(repo_id, hub_cache)
    if snapshot is None or not _lists_weights(snapshot):
        if not allow_download or constants.is_offline_mode():
            raise _not_cached(repo_id, CONFIG if snapshot is None else SINGLE)
        snapshot = _fetch_small_files(repo_id, hub_cache, progress)
        if not _lists_weights(snapshot):  # no index: all in one file, if there are safetensors at all
            fetch_file(repo_id, SINGLE, snapshot, progress)
    return HubCheckpoint(repo_id, snapshot, cache_dir=cache_dir, allow_download=allow_download, progress=progress)


def fetch_file(repo_id: str, file_name: str, snapshot: Path, progress: Progress) -> Path:
    """Fetches one file of the commit that `snapshot` holds, into it. Raises ModelNotFound."""
    label = f"{repo_id}/{file_name}"

    def fetch() -> str:
        return hf_hub_download(
            repo_id,
            file_name,
            revision=snapshot.name,
            cache_dir=snapshot.parents[2],
            etag_timeout=ANSWER_WITHIN_S,
            tqdm_class=_bar(label, progress),
        )

    return Path(_asking_the_hub(repo_id, fetch))


def _cached_snapshot(repo_id: str, hub_cache: Path | None) -> Path | None:
    """The newest snapshot in the cache, if it has at least a configuration."""
    try:
        folder = snapshot_download(repo_id, cache_dir=hub_cache, local_files_only=True, allow_patterns=[CONFIG, INDEX])
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ModelNotFound(f"{repo_id!r} is no hub id: {error}") from None
    return Path(folder) if (Path(folder) / CONFIG).is_file() else None


def _fetch_small_files(repo_id: str, hub_cache: Path | None, progress: Progress) -> Path:
    def fetch() -> str:
        return snapshot_download(
            repo_id,
            cache_dir=hub_cache,
            allow_patterns=list(SMALL_FILES),
            etag_timeout=ANSWER_WITHIN_S,
            tqdm_class=_bar(f"{repo_id}: configuration", progress),
        )

    return Path(_asking_the_hub(repo_id, fetch))


def _lists_weights(snapshot: Path) -> bool:
    return (snapshot / INDEX).is_file() or any(snapshot.glob("*.safetensors"))


def _asking_the_hub(repo_id: str, ask: Callable[[], T]) -> T:
    """`ask()`, if the hub answers at all. The library's exceptions become ModelNotFound here."""
    try:
        # A request that fails soon, for what the library does after it retries for half a minute.
        _within(ANSWER_WITHIN_S, lambda: HfApi().model_info(repo_id, timeout=ANSWER_WITHIN_S))
        return ask()
    except GatedRepoError:
        raise ModelNotFound(
            f"{repo_id} is gated",
            advice="Accept its licence on the hub, then log in with: hf auth login.",
        ) from None
    except RepositoryNotFoundError:
        raise ModelNotFound(
            f"the hub has no model {repo_id}, or it is private",
            advice="Check the spelling; for a private model log in with: hf auth login.",
        ) from None
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, TimeoutError) as error:
        raise _unreachable(repo_id, error) from error
    except EntryNotFoundError as error:
        raise ModelNotFound(
            f"{repo_id} holds no weights as safetensors ({SINGLE} or {INDEX})",
            advice="Convert it: load it with transformers and call save_pretrained.",
        ) from error
    except (HTTPError, OSError) as error:
        if getattr(error, "errno", None) in OF_THE_DISK:
            raise _not_kept(repo_id, error) from error
        raise _unreachable(repo_id, error) from error


def _not_kept(repo_id: str, error: BaseException) -> ModelNotFound:
    return ModelNotFound(
        f"{repo_id} cannot be kept in the hub's cache: {error}",
        advice="See that it has room and may be written, or set HF_HOME to another folder.",
    )


def _unreachable(repo_id: str, error: BaseException) -> ModelNotFound:
    reason = "offline mode is on" if constants.is_offline_mode() else f"{type(error).__name__}: {error}"
    return ModelNotFound(
        f"{repo_id} is not (whole) in the hub's cache, and the hub cannot be reached ({reason})",
        advice="Connect to the internet, or give a local directory or a .gguf file.",
    )


def _not_cached(repo_id: str, file_name: str) -> ModelNotFound:
    why = "offline mode is on" if constants.is_offline_mode() else "downloads are off"
    return ModelNotFound(
        f"{file_name} of {repo_id} is not in the hub's cache, and {why}",
        advice=f"Fetch it while online (hf download {repo_id}), or give a local directory or a .gguf file.",
    )


def _within(seconds: float, function: Callable[[], T]) -> T:
    """`function()` in a thread that is left behind if it takes longer. Raises TimeoutError."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except (HTTPError, OSError, ValueError) as error:  # carried over to the caller's thread
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def _bar(label: str, progress: Progress) -> type:
    """A stand-in for tqdm, as far as huggingface_hub uses it, which reports to `progress`."""

    class Bar:
        def __init__(self, *_: object, total: float | None = None, initial: float = 0, **__: object):
            self.total, self.n, self.desc, self.postfix = total or 0, initial, "", ""

        def update(self, count: float | None = 1) -> None:
            self.n += count or 0
            if self.total:
                progress(label, int(min(self.n, self.total)), int(self.total))

        def refresh(self, *_: object, **__: object) -> None: ...

        def reset(self, total: float | None = None) -> None:
            self.n, self.total = 0, total or self.total

        def set_description(self, desc: str = "", *_: object, **__: object) -> None:
            self.desc = desc

        set_description_str = set_postfix_str = set_description

        def close(self) -> None: ...

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

    return Bar
