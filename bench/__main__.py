"""`python -m bench [--only NAME]`: runs the parts, prints a table, writes bench.json. Measures and never judges."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bench import (
    directory,
    engine,
    faults,
    herd,
    joins,
    moves,
    placement,
    plans,
    process,
    quantized,
    rival,
    simulated,
    speed,
    watched,
    wide,
    wire_codec,
)
from bench.children import ChildFailed
from bench.figures import Figure, as_json
from bench.setting import Setting
from routing.errors import SwarmError

Part = Callable[[Setting], list[Figure]]
PARTS: dict[str, Part] = {
    "decode": speed.decode,
    "ttft": speed.ttft,
    "eight": speed.eight,
    "one": engine.one,
    "many": engine.many,
    "quantized": quantized.quantized,
    "experts": engine.experts,
    "beside": engine.beside,
    "pinned": engine.pinned,
    "chat": engine.chat,
    "idle": engine.idle,
    "stall": faults.stall,
    "freeze": faults.freeze,
    "wide": wide.speed,
    "chosen": wide.chosen,
    "lost": wide.lost,
    "silent": wide.silent,
    "warm": wide.warm,
    "leave": wide.leave,
    "forget": faults.forget,
    "split": wide.split,
    "narrow": wire_codec.narrow,
    "codec": wire_codec.codec,
    "herd": herd.herd,
    "plans": plans.plans,
    "guesses": plans.guesses,
    "directory": directory.directory,
    "simulated": simulated.simulated,
    "placement": placement.placement,
    "moves": moves.moves,
    "watched": watched.watched,
    "memory": process.memory,
    "launch": process.launch,
    "joins": joins.joins,
}
LONG_PARTS: dict[str, Part] = {"eight20": speed.eight20, "alarms": wide.alarms, "rival": rival.rival}
METHOD = (
    "fp32 unless said, one torch thread a process, real processes on loopback, greedy, end of text ignored. A figure "
    "is the median of its runs; a ratio is taken within its round, in which the local model (transformers generate, in "
    "a process of its own) and the swarm take turns."
)


def main() -> None:
    options = _options()
    every = PARTS | LONG_PARTS
    names = options.only or list(every if options.all else PARTS)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # as an exception: everything is cleaned up
    console = Console(highlight=False)
    figures: list[Figure] = []
    failed = False
    with Setting(options.model, options.rounds) as setting:
        for name in names:
            begun = time.monotonic()
            console.print(f"{name}: measuring ({process.machine()})", markup=False)
            try:
                found = every[name](setting)
            except (ChildFailed, SwarmError) as error:
                console.print(f"{name} could not be measured: {type(error).__name__}: {error}", markup=False)
                failed = True
                continue
            figures += found
            options.output.write_text(as_json(figures))
            console.print(f"{name}: {time.monotonic() - begun:.0f} s", markup=False)
    console.print(table(figures))
    console.print(METHOD, style="dim", markup=False)
    console.print(f"written to {options.output}", markup=False)
    sys.exit(1 if failed else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", action="append", choices=[*PARTS, *LONG_PARTS], help="one part; may be repeated")
    parser.add_argument(
        "--all", action="store_true", help=f"those too that take long or want other programs: {', '.join(LONG_PARTS)}"
    )
    parser.add_argument("--model", default="smollm2", help="a model of 30 blocks")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each figure")
    parser.add_argument("--output", type=Path, default=Path("bench.json"))
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def table(figures: list[Figure]) -> Group:
    """A line a figure; what was done stands below, numbered, so that the table fits 80 columns."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("figure")
    shown.add_column("value", justify="right", no_wrap=True)
    shown.add_column("unit")
    shown.add_column("lowest .. highest", no_wrap=True)
    shown.add_column("note", justify="right", no_wrap=True)
    notes: dict[str, int] = {}
    for figure in figures:
        number = notes.setdefault(figure.note, len(notes) + 1) if figure.note else ""
        spread = f"{_short(min(figure.runs))} .. {_short(max(figure.runs))}"
        shown.add_row(figure.figure, _short(figure.value), figure.unit, spread, str(number))
    return Group(shown, *(Text(f"{number:>2}  {note}", style="dim") for note, number in notes.items()))


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
