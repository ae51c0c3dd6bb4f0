"""What a command prints and how it ends: text or JSON, progress bars, named errors without tracebacks, exit codes.

stdout carries the result (with --json nothing but JSON), stderr the words about it. Knows no swarm and no model.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import os
import sys
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from rich.console import Console as RichConsole
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from routing.errors import StartError, SwarmError
from swarm.progress import Progress as Report
from swarm.progress import silent

T = TypeVar("T")

OURS = ("routing", "swarm", "peer")
# What the disk keeps or does not, and what is not loaded yet, is the user's affair.
TOLD = ("swarm.disk_cache", "peer.measured", "peer.loading")

MAKE_ROOM = "Make room where the output and temporary files go, then try again."

UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT)
BUG = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
CLOSED_PIPE = 141  # 128 + SIGPIPE


class _Rich(RichConsole):
    def on_broken_pipe(self) -> None:
        """Called while that error is handled. It goes on as with any other stream; rich would end the process."""
        raise


class Console:
    """With `as_json`, stdout carries JSON only; words for people are left out, errors become objects, too."""

    def __init__(self, *, as_json: bool = False, verbose: bool = False):
        self.as_json, self.verbose = as_json, verbose
        self.out = _Rich(highlight=False, soft_wrap=True)
        self.err = _Rich(stderr=True, highlight=False, soft_wrap=True)

    # -- the result: stdout ----------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        if not self.as_json:
            self.out.print(harmless(text), markup=False)

    def plain(self, text: str, end: str = "\n") -> None:
        """Exactly this text, for copying and for pipes."""
        if not self.as_json:
            sys.stdout.write(text + end)
            sys.stdout.flush()

    def stream(self, text: str) -> None:
        """A piece of a model's text as it comes. On a terminal nothing in it steers the terminal."""
        self.plain(harmless(text) if self.out.is_terminal else text, end="")

    def show(self, renderable: Any) -> None:
        if not self.as_json:
            self.out.print(renderable)

    @contextmanager
    def live(self) -> Iterator[Callable[[Any], None]]:
        """A picture that the next one replaces; the last one stays. Where no terminal is, each is printed."""
        if self.as_json or not self.out.is_terminal:
            yield self.show
            return
        # A console of its own: its lines must be cut at the edge, else the picture cannot be drawn over.
        with Live(console=RichConsole(highlight=False), auto_refresh=False) as picture:
            yield lambda renderable: picture.update(renderable, refresh=True)

    def event(self, facts: dict[str, Any]) -> None:
        """One JSON object on a line."""
        if self.as_json:
            sys.stdout.write(json.dumps(facts, default=str) + "\n")
            sys.stdout.flush()

    # -- words about it: stderr ------------------------------------------------------------------------------

    def note(self, text: str, style: str = "dim") -> None:
        if not self.as_json:
            self.err.print(harmless(text), style=style, markup=False)

    def detail(self, renderable: Any) -> None:
        """A table about it."""
        if not self.as_json:
            self.err.print(renderable)

    @contextmanager
    def progress(self, label: str = "") -> Iterator[Report]:
        """Bars on stderr, gone at the end; nothing where nobody looks. `label` shows that something goes on as long
        as nothing measures how far it is."""
        if self.as_json or not self.err.is_terminal:
            yield silent
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), _Share())
        with Progress(*columns, TimeElapsedColumn(), console=self.err, transient=True) as bars:
            whole = bars.add_task(label, total=None) if label else None
            tasks: dict[str, Any] = {}

            def report(label: str, done: int, total: int) -> None:
                if label not in tasks:
                    tasks[label] = bars.add_task(harmless(label), total=total)
                bars.update(tasks[label], completed=done, total=total, visible=done < total)
                if whole is not None:
                    bars.update(whole, visible=done >= total)

            yield report


class _Share(ProgressColumn):
    """Per cent, where it is known."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.percentage:>3.0f}%")


def harmless(text: str) -> str:
    """Without characters that steer a terminal: what comes from others may be anything. Line ends and tabs stay."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\N{REPLACEMENT CHARACTER}" for c in text)


class guarded:  # reads like a function: `with guarded(console):`
    """However the block ends, the user gets a message, advice and an exit code; a traceback only with --verbose."""

    def __init__(self, console: Console):
        self.console = console

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        error = _innermost(error)
        if self.console.verbose and isinstance(error, Exception):
            traceback.print_exception(error)
        match error:
            case None | SystemExit():
                return
            case KeyboardInterrupt() | asyncio.CancelledError():
                interrupted(self.console)
            case BrokenPipeError():
                _stdout_is_closed()
            case SwarmError():
                fail(self.console, error)
            case OSError(errno=errno.ENOSPC | errno.EDQUOT):
                raise error  # `process` tells it: there may be no room for words either
            case Exception():
                _bug(self.console, error)


def _innermost(error: BaseException | None) -> BaseException | None:
    """What a group of tasks raised, if it was one thing; of several the first that has a name of ours. What fails
    while Ctrl-C is being obeyed is part of it."""
    while isinstance(error, BaseExceptionGroup):
        named = [each for each in error.exceptions if isinstance(each, SwarmError | BaseExceptionGroup)]
        error = (named or error.exceptions)[0]
    before = error
    while before is not None and not isinstance(before, KeyboardInterrupt):
        before = before.__context__
    return before or error


def interrupted(console: Console) -> None:
    """Ctrl-C: what had to be cleaned up has been, by whoever was interrupted."""
    console.event({"event": "interrupted"})
    console.note("interrupted")
    sys.exit(INTERRUPTED)


def fail(console: Console, error: SwarmError) -> None:
    tell(console, type(error).__name__, str(error), error.advice)
    sys.exit(error.exit_code)


def _bug(console: Console, error: Exception) -> None:
    advice = "Please report it, with the traceback above."
    if not console.verbose:
        advice = "Please report it, with what --verbose shows when you run it again."
    tell(console, type(error).__name__, f"{error} (this is a bug in this program)", advice)
    sys.exit(BUG)


def tell(console: Console, name: str, message: str, advice: str) -> None:
    console.event({"event": "error", "error": name, "message": message, "advice": advice})
    console.note(f"{name}: {message}", style="bold red")
    if advice:
        console.note(advice, style="")


def _stdout_is_closed() -> None:
    """Whoever read our output has left (`| head`): nothing more to say, also not what is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(CLOSED_PIPE)


def _unwritten(error: OSError) -> int:
    """The exit code when not all of the output, or no temporary file, could be written."""
    if isinstance(error, BrokenPipeError):
        return CLOSED_PIPE
    with suppress(OSError):
        sys.stderr.write(f"StartError: {error}\n{MAKE_ROOM}\n")
        sys.stderr.flush()
    return StartError.exit_code


def process(command: Callable[[], object]) -> NoReturn:
    """Runs a command and ends the process at once with its exit code.

    By then the command has cleaned up. The interpreter's own farewell would take apart what torch and transformers
    have loaded, object by object: one to three seconds for nothing. It would also wait for threads in the middle of
    something, a download for example, and so would whoever pressed Ctrl-C.

    Until `run` the garbage collector is off: importing torch and transformers makes a million objects and no garbage,
    and looking through them again and again is a fifth of the start.
    """
    gc.disable()
    code: object = 0
    try:
        command()
    except SystemExit as ended:
        code = ended.code or 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        code = _unwritten(error)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        code = code or _unwritten(error)
    os._exit(code if isinstance(code, int) else BUG)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs it on uvloop. Ctrl-C cancels it; when its clean-up is done, nobody waits for threads that still work."""
    import uvloop

    gc.freeze()  # what is imported stays
    gc.enable()
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        result = runner.run(work)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise KeyboardInterrupt from None
    except BaseException:
        runner.close()
        raise
    runner.close()
    return result


class _Lines(logging.Formatter):
    """One line an entry; tracebacks only where they are wanted."""

    def __init__(self, tracebacks: bool):
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s")
        self._tracebacks = tracebacks

    def formatException(self, ei: Any) -> str:
        return super().formatException(ei) if self._tracebacks else ""


def setup_logging(verbose: bool) -> None:
    """Before the large libraries are imported: they look at this once."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(verbose))
    logging.basicConfig(level=logging.INFO if verbose else logging.CRITICAL, handlers=[handler], force=True)
    # Libraries speak of their own affairs; what a user should know is said here by name.
    for package in OURS:
        logging.getLogger(package).setLevel(logging.INFO if verbose else logging.ERROR)
    if not verbose:
        for module in TOLD:
            logging.getLogger(module).setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
