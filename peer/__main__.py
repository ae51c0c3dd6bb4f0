"""`python -m peer`: what `swarm serve` runs. Options in, a `PeerConfig` out; signals; the one place that prints."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from peer.sizes import parse_size
from routing.errors import BadInput
from routing.types import Span
from swarm.joincode import JoinCode
from swarm.terminal import Console, guarded, process, run, setup_logging

T = TypeVar("T")

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

NEW = "new"  # in place of a join code

EXAMPLE = """
Serve blocks of MODEL to a swarm: join one with --join CODE, or begin a new one and get its code.

Several models are served by one peer, each to its own swarm: give --join (and --blocks, if at all) once for each
model, in the order of the models. In place of a code, new begins a swarm.

MODEL is a directory with config.json and safetensors files, a .gguf file, a hub id, or smollm2 (the small model
that comes with this package). Ctrl-C leaves the swarm in good order.

\b
Example:  swarm serve smollm2 --blocks 0:15
          swarm serve smollm2 --join CODE
          swarm serve smollm2 ./other-model --join CODE --join new
"""


@app.command(help=EXAMPLE)
def serve(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="directory, .gguf file, hub id, or smollm2")],
    join: Annotated[
        list[str], typer.Option(help="join code of the swarm (-: read from stdin); without it a new swarm begins")
    ] = [],  # noqa: B006
    blocks: Annotated[
        list[str], typer.Option(metavar="A:B", help="blocks to serve; without it what the swarm lacks most, as fits")
    ] = [],  # noqa: B006
    most_blocks: Annotated[
        int | None, typer.Option(metavar="N", help="blocks at most, of each model, without --blocks")
    ] = None,
    rebalance: Annotated[
        float, typer.Option(metavar="S", help="without --blocks: look as often whether others need it more; 0: never")
    ] = 120.0,
    host: Annotated[str, typer.Option(help="address to listen on (:: for IPv6)")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="port for other peers and clients; 0: the system chooses")] = 0,
    dht_port: Annotated[int, typer.Option(help="port of the swarm's directory; 0: the system chooses")] = 0,
    announce: Annotated[
        list[str], typer.Option(help="address:port to tell others instead of this machine's own; may be repeated")
    ] = [],  # noqa: B006
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    quantize: Annotated[
        str, typer.Option(help="weights in none, int8, int4, nf4, or auto: int8 where that is faster")
    ] = "none",
    region: Annotated[
        str, typer.Option(metavar="NAME", help="the data region this peer is in, told to clients, as eu or us-east")
    ] = "",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:N, mps, or several as cuda:0,cuda:1; auto: the best that is here")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(help="cores for computing; all, or a share beside other peers")] = None,
    nice: Annotated[bool, typer.Option("--nice", help="compute only while nobody else wants the processor")] = False,
    max_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="most for weights and sessions' caches together, as 4G or 900M")
    ] = None,
    cache: Annotated[int | None, typer.Option(metavar="MIB", help="memory for sessions' caches")] = None,
    model_cache: Annotated[
        str,
        typer.Option(
            metavar="SIZE", envvar="SWARM_MODEL_CACHE", help="most that models from other peers may take on the disk"
        ),
    ] = "64G",
    identity: Annotated[Path | None, typer.Option(help="key file of this peer; made if it is not there")] = None,
    direct: Annotated[bool, typer.Option(help="direct connections (else only the swarm's own network)")] = True,
    metrics_port: Annotated[
        int | None, typer.Option(help="port of a page for Prometheus, /metrics; 0: the system chooses; off by default")
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="address of that page; whoever can reach it can read it")
    ] = "127.0.0.1",
    daemon: Annotated[str | None, typer.Option(hidden=True)] = None,
    until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line on stdout")] = False,
    verbose: Annotated[bool, typer.Option(help="log what happens; show tracebacks")] = False,
) -> None:
    console = Console(as_json=as_json, verbose=verbose)
    setup_logging(verbose)
    with guarded(console):
        spans = _one_each("--blocks", [Span.parse(each) for each in blocks], models)
        max_memory_bytes = parse_size(max_memory) if max_memory else None
        model_cache_bytes = parse_size(model_cache)
        codes = _one_each("--join", join, models)
        codes = [None if code == NEW else code for code in codes]
        for code in codes:
            if code and code != "-":
                JoinCode.parse(code)  # a typing error is told at once
        with console.progress("starting"):
            _import("peer.peer")  # torch takes seconds to import: not before --help
        from peer.config import PeerConfig

        of_models: list[dict[str, Any]] = [
            {"model": model, "join": sys.stdin.readline().strip() if code == "-" else code, "blocks": span}
            for model, code, span in zip(models, codes, spans, strict=True)
        ]
        first = PeerConfig(
            **of_models[0],
            most_blocks=most_blocks,
            rebalance_s=rebalance,
            host=host,
            port=port,
            dht_port=dht_port,
            announce=tuple(announce),
            dtype=dtype,
            quantize=quantize,
            region=region,
            device=device,
            threads=threads,
            nice=nice,
            max_memory_bytes=max_memory_bytes,
            model_cache_bytes=model_cache_bytes,
            cache_bytes=None if cache is None else cache << 20,
            identity_path=identity,
            direct=direct,
            daemon=daemon,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
        )
        configs = [replace(first, **of_model) for of_model in of_models]
        run(_serve(configs, console, until_stdin_closes))


def _one_each(option: str, given: list[T], models: list[str]) -> Sequence[T | None]:
    """Raises BadInput."""
    if given and len(given) != len(models):
        advice = f"Give {option} once for each model, in their order."
        if option == "--join":
            advice += f" A code names one model's swarm; {NEW!r} begins one."
        raise BadInput(f"{len(models)} models, and {len(given)} times {option}", advice=advice)
    return given or [None] * len(models)


def _import(module: str) -> None:
    """Without the collector: what is imported stays, and looking for garbage in it takes a fifth of the time. Nor is it
    looked through later."""
    gc.disable()
    try:
        import_module(module)
    finally:
        gc.freeze()
        gc.enable()


async def _serve(configs, console: Console, until_stdin_closes: bool) -> None:
    from peer.peer import Peer

    stop, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    started = False

    def on_signal() -> None:
        if not started:
            main.cancel()  # there is nothing to say goodbye to yet
        elif stop.is_set():
            at_once.set()
        stop.set()

    def on_input() -> None:
        if not os.read(sys.stdin.fileno(), 1024):
            loop.remove_reader(sys.stdin.fileno())
            on_signal()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    if until_stdin_closes:
        loop.add_reader(sys.stdin.fileno(), on_input)
    with console.progress("joining the swarm" if any(c.join for c in configs) else "beginning a swarm") as progress:
        moved, grown = partial(_moved, console), partial(_grown, console)
        peer = Peer(configs, progress, lambda notice: _tell(notice, console), moved, grown)
        await peer.__aenter__()
    started = True
    try:
        for node in peer.nodes:
            _announce(node.serving, console)
        console.say("Ctrl-C leaves the swarm in good order")
        renewing = asyncio.create_task(peer.run())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({renewing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        tasks = [renewing, stopping]
        if not renewing.done():
            if peer.sessions:
                with unheard():
                    console.say("handing over the sessions that are here; Ctrl-C again leaves at once")
            tasks += [asyncio.create_task(peer.hand_over()), asyncio.create_task(at_once.wait())]
            await asyncio.wait({renewing, *tasks[2:]}, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    finally:
        with unheard():
            console.say("leaving the swarm")
        await peer.__aexit__(None, None, None)
    console.event({"event": "left"})


def unheard() -> contextlib.suppress:
    """Whoever read what a peer says has left, or the disk where it is kept is full: the peer serves on."""
    return contextlib.suppress(OSError)


def _tell(notice, console: Console) -> None:
    """Whether others can connect to this peer, when that is news."""
    tried = [{"address": address, "reason": reason} for address, reason in notice.tried]
    facts = {"message": notice.message, "advice": notice.advice, "addresses": tried}
    with unheard():
        console.event({"event": "reachable" if notice.reachable else "unreachable", **facts})
        console.note(f"{notice.message}: {notice.advice}" if notice.advice else notice.message, style="")


def _moved(console: Console, model: str, span: Span) -> None:
    with unheard():
        console.event({"event": "moved", "model": model, "span": str(span)})
        console.note(f"serving blocks {span} of {model} now: the swarm needs them more", style="")


def _grown(console: Console, model: str, span: Span) -> None:
    with unheard():
        console.event({"event": "loaded", "model": model, "span": str(span)})
        console.note(f"all blocks of {span} of {model} are loaded and served now", style="")


def _announce(serving, console: Console) -> None:
    facts = asdict(serving)
    facts["span"], facts["loads"] = str(serving.span), str(serving.loads)
    console.event({"event": "serving", **facts})
    model = serving.model
    console.say(f"serving {model}, blocks {serving.span} of {serving.n_blocks}, as {serving.peer_id}")
    mib = serving.weights_bytes / 2**20
    weights, room = f"{mib:.0f} MiB ({serving.dtype})", f"{serving.cache_positions:,} tokens of context"
    console.say(f"at {serving.address}; weights {weights}, room for {room}")
    if len(serving.devices) > 1:
        console.say(f"computing on {' and '.join(serving.devices)}")
    if serving.loads != serving.span:
        console.say(f"the rest of blocks {serving.loads} is served as it is loaded")
    if serving.metrics:
        console.say(f"metrics at {serving.metrics}")
    console.say(f"join code for {model}:")
    console.plain(serving.join_code)
    console.say(f"to help:    swarm serve {model} --join CODE")
    console.say(f"to use it:  swarm generate {model} 'Hello' --join CODE")


def main() -> None:
    process(lambda: app(prog_name="swarm serve"))


if __name__ == "__main__":
    main()

