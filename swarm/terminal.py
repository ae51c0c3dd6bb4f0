"""What a command prints and how it ends: text or JSON, progress bars, named errors without tracebacks, exit codes."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from routing.errors import SwarmError
from swarm.progress import Progress as Report
from swarm.progress import silent

INTERRUPTED = 130


class Console:
    """With `as_json`, stdout carries JSON lines only; words for people go to stderr, or nowhere."""

    def __init__(self, *, as_json: bool = False, verbose: bool = False):
        self.as_json, self.verbose = as_json, verbose
        self.out = RichConsole(highlight=False, soft_wrap=True)
        self.err = RichConsole(stderr=True, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        if not self.as_json:
            self.out.print(text, markup=False)

    def plain(self, text: str, end: str = "\n") -> None:
        """Exactly this text, for copying and for pipes."""
        if not self.as_json:
            sys.stdout.write(text + end)
            sys.stdout.flush()

    def show(self, renderable: Any) -> None:
        if not self.as_json:
            self.out.print(renderable)

    def event(self, facts: dict[str, Any]) -> None:
        if self.as_json:
            sys.stdout.write(json.dumps(facts, default=str) + "\n")
            sys.stdout.flush()

    @contextmanager
    def progress(self) -> Iterator[Report]:
        """Bars on stderr for what takes longer than a moment; nothing where nobody looks."""
        if self.as_json or not self.err.is_terminal:
            yield silent
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        with Progress(*columns, TimeElapsedColumn(), console=self.err, transient=True) as bars:
            tasks: dict[str, Any] = {}

            def report(label: str, done: int, total: int) -> None:
                if label not in tasks:
                    tasks[label] = bars.add_task(label, total=total)
                bars.update(tasks[label], completed=done, total=total)

            yield report


@contextmanager
def guarded(console: Console) -> Iterator[None]:
    """Turns errors into a message, advice and an exit code; a traceback only with --verbose."""
    try:
        yield
    except SwarmError as error:
        if console.verbose:
            console.err.print_exception()
        fail(console, error)
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.event({"event": "interrupted"})
        console.err.print("interrupted", markup=False)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has left: nothing more to say
        sys.exit(0)


def fail(console: Console, error: SwarmError) -> None:
    name = type(error).__name__
    console.event({"event": "error", "error": name, "message": str(error), "advice": error.advice})
    if not console.as_json:
        console.err.print(f"{name}: {error}", style="bold red", markup=False)
        if error.advice:
            console.err.print(error.advice, markup=False)
    sys.exit(error.exit_code)


def setup_logging(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.ERROR,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    logging.Formatter.converter = time.localtime
    if not verbose:
        # Libraries speak of their own affairs; what a user should know comes as a named error.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
