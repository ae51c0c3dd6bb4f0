"""The command line: `swarm serve`, `generate`, `chat`, `status`, `top`, `route`, `demo`, `simulate`. Options in, an
exit code out.

Reads the arguments, the environment and standard input; what a command does is in `commands/`. Nothing slow is
imported before a command runs, so that --help answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from swarm.terminal import INTERRUPTED, Console, guarded, process, setup_logging
from swarm.terminal import run as run_loop

UsageError: Any = typer.BadParameter.__mro__[1]  # of click, or of typer's own copy of it: as the version has it

EXIT_CODES = """
Exit codes:
  0 done | 1 a bug, the demo's texts differ, or a simulated answer failed without need | 2 bad input | 3 the model
  cannot be used | 4 blocks that nobody serves | 5 the swarm cannot be joined | 6 this machine cannot do it | 7 the
  text was broken off | 130 Ctrl-C
"""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="\b\n"
    "Run a language model on a swarm of machines: each serves some of its blocks.\n"
    "\n"
    "\b\n"
    "Try it:   swarm demo\n"
    "Begin:    swarm serve smollm2            prints a join code; give it to others\n"
    "Help:     swarm serve smollm2 --join CODE\n"
    "Use:      swarm generate smollm2 'Why is the sky blue?' --join CODE\n" + "\n\b" + EXIT_CODES,
)

MODEL_HELP = "directory, .gguf file, hub id, or smollm2 (comes with this program)"

Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Join = Annotated[str, typer.Option(metavar="CODE", envvar="SWARM_JOIN", help="join code of the swarm")]
MaxNewTokens = Annotated[int | None, typer.Option(metavar="N", min=1, help="length of the answer at most")]
Temperature = Annotated[float | None, typer.Option(metavar="X", help="sample; higher is wilder")]
TopK = Annotated[int | None, typer.Option(metavar="K", help="sample among the K likeliest tokens; 0: among all")]
TopP = Annotated[float | None, typer.Option(metavar="X", help="sample among the likeliest that make up this share")]
Penalty = Annotated[float | None, typer.Option(metavar="X", help="above 1: say again less of what was said")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="sample, the same each time")]
Stop = Annotated[list[str], typer.Option(metavar="TEXT", help="end before this text; may be repeated")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="what the model is told before the conversation")]
Wait = Annotated[float, typer.Option(metavar="SECONDS", min=0, help="wait so long for blocks that nobody serves")]
Timeout = Annotated[float | None, typer.Option(metavar="SECONDS", min=0, help="give an answer up after this time")]
Standby = Annotated[
    str,
    typer.Option(
        metavar="none|inputs|warm",
        help="what a second peer of each hop does, if there is one: keep what the hop is sent, or compute it too",
    ),
]
Only = Annotated[list[str], typer.Option(metavar="PEER", help="use these peers alone; may be repeated")]
Never = Annotated[list[str], typer.Option(metavar="PEER", help="never use this peer; may be repeated")]
Trusted = Annotated[
    list[str], typer.Option(metavar="PEER", help="a peer for the first and last block, no others; may be repeated")
]
Region = Annotated[
    list[str], typer.Option(metavar="NAME", help="use peers alone that state this data region; may be repeated")
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="use peers alone that state that they compute in --dtype, and send every hidden state as it is; else it "
        "may be shortened to 8 bits on slow links",
    ),
]
Goal = Annotated[
    str,
    typer.Option(
        metavar="latency|throughput|hops",
        help="what a route is chosen for: one token's time, many prompts at once, or few links that cost",
    ),
]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="float32 or bfloat16, here and on the wire")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, nothing else")]
Verbose = Annotated[bool, typer.Option("--verbose", help="log what happens; show tracebacks")]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"swarm {version('swarm-runtime')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="show it")] = False,
) -> None:
    pass


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def serve(context: typer.Context) -> None:
    """Serve blocks of a model: join a swarm, or begin one."""
    # -P: a folder called `peer` where the user stands must not be run instead.
    command = [sys.executable, "-P", "-m", "peer", *context.args]
    sys.stdout.flush()
    os.execv(sys.executable, command)


@app.command(no_args_is_help=True)
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="the question, or - to read it from standard input")],
    join: Join,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    stop: Stop = [],  # noqa: B006  typer's way
    raw: Annotated[bool, typer.Option("--raw", help="continue the text as it is, without the chat template")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="show where the time of the tokens went")] = False,
    system: System = None,
    wait: Wait = 0.0,
    timeout: Timeout = None,
    standby: Standby = "inputs",
    only: Only = [],  # noqa: B006
    never: Never = [],  # noqa: B006
    trusted: Trusted = [],  # noqa: B006
    region: Region = [],  # noqa: B006
    exact: Exact = False,
    objective: Goal = "latency",
    dtype: Dtype = "float32",
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Answer one question.

    The text goes to stdout as it comes, its figures to stderr. A model with a chat template is asked through it;
    --raw continues PROMPT as it stands. Without sampling options the likeliest token is taken each time, so the
    same question gets the same answer.

    \b
    Example:  swarm generate smollm2 'Why is the sky blue?' --join CODE
              cat letter.txt | swarm generate smollm2 - --raw --max-new-tokens 50 --join CODE
    """
    console = _console(as_json, verbose)
    with guarded(console):
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        _check(join)
        from swarm.commands.asking import Asking
        from swarm.commands.generate import generate as answer

        asking = Asking(
            model=model, join=join, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            repetition_penalty=repetition_penalty, seed=seed, stop=tuple(stop), system=system, wait_s=wait,
            timeout_s=timeout, standby=standby, only=tuple(only), never=tuple(never), trusted=tuple(trusted),
            region=tuple(region), exact=exact, objective=objective, dtype=dtype,
        )  # fmt: skip
        run_loop(answer(console, asking, text, raw=raw, trace=trace))


@app.command(no_args_is_help=True)
def chat(
    model: Model,
    join: Join,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    stop: Stop = [],  # noqa: B006  typer's way
    system: System = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE", help="keep the conversation there; go on with it if it is there"),
    ] = None,
    wait: Wait = 0.0,
    timeout: Timeout = None,
    standby: Standby = "inputs",
    only: Only = [],  # noqa: B006
    never: Never = [],  # noqa: B006
    trusted: Trusted = [],  # noqa: B006
    region: Region = [],  # noqa: B006
    exact: Exact = False,
    objective: Goal = "latency",
    dtype: Dtype = "float32",
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Talk with the model.

    Each line is said to it; /help tells what else there is. The conversation stays with the peers that answer, so
    each turn sends only what is new. Lines may come from a pipe, too. With --json each answer is one JSON object.
    --save FILE writes down each token before it is shown: after a crash the same command goes on where it was.

    \b
    Example:  swarm chat smollm2 --join CODE
              printf 'Hello\\nTell me more\\n' | swarm chat smollm2 --join CODE
    """
    console = _console(as_json, verbose)
    with guarded(console):
        _check(join)
        from swarm.commands.asking import Asking
        from swarm.commands.chat import chat as talk

        asking = Asking(
            model=model, join=join, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            repetition_penalty=repetition_penalty, seed=seed, stop=tuple(stop), system=system, wait_s=wait,
            timeout_s=timeout, standby=standby, only=tuple(only), never=tuple(never), trusted=tuple(trusted),
            region=tuple(region), exact=exact, objective=objective, dtype=dtype,
        )  # fmt: skip
        talk(console, asking, save)


@app.command()
def status(join: Join, as_json: Json = False, verbose: Verbose = False) -> None:
    """Show who serves which blocks.

    How fast each peer is, why one does not serve as it should, which blocks nobody serves, and a join code that names
    peers of now. Exit code 0 if all blocks are served, 4 if some are not. Only peers that answer count.

    \b
    Example:  swarm status --join CODE
              swarm status --json --join CODE | jq .nobody_serves
    """
    console = _console(as_json, verbose)
    with guarded(console):
        _check(join)
        from swarm.commands.status import status as show

        sys.exit(run_loop(show(console, join)))


@app.command()
def top(
    join: Join,
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.1, help="between two looks")] = 2.0,
    looks: Annotated[
        int | None, typer.Option("--looks", metavar="N", min=1, help="end after so many; without it at Ctrl-C")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Watch the swarm live.

    Who serves which blocks, what changed since the last look, and how busy each peer is. Ctrl-C leaves. Into a pipe
    each look is one table, with --json one object on a line. After the last of --looks the exit code is 4 if some
    blocks are not served.

    \b
    Example:  swarm top --join CODE
              swarm top --json --looks 1 --join CODE | jq .changed
    """
    console = _console(as_json, verbose)
    with guarded(console):
        _check(join)
        try:
            from swarm.commands.top import top as show

            code = run_loop(show(console, join, every_s=every, looks=looks))
        except KeyboardInterrupt:
            code = 0  # the way to leave it
        sys.exit(code)


@app.command()
def route(
    join: Join,
    why: Annotated[bool, typer.Option("--explain", help="show the runner-up too, and who was left out")] = False,
    only: Only = [],  # noqa: B006
    never: Never = [],  # noqa: B006
    trusted: Trusted = [],  # noqa: B006
    region: Region = [],  # noqa: B006
    exact: Exact = False,
    objective: Goal = "latency",
    dtype: Dtype = "float32",
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show the way that a token would take now.

    Each hop with its milliseconds, as measured from here and as the peers say. --explain shows the runner-up, each
    term of both, and which peers were left out for which reason. Exit code 4 if some blocks are not served. The other
    options mean what they mean in `swarm generate`; throughput is by what peers compute, links are not counted.

    \b
    Example:  swarm route --join CODE --explain
              swarm route --json --join CODE | jq .route.ms
    """
    console = _console(as_json, verbose)
    with guarded(console):
        _check(join)
        from routing.constraints import Constraints
        from routing.types import Objective
        from swarm.commands.route import route as show

        constraints = Constraints.of(
            only=only or None, never=never, trusted=trusted or None, region=region or None,
            exact=dtype if exact else None,
        )  # fmt: skip
        run_loop(show(console, join, why=why, constraints=constraints, objective=Objective.parse(objective)))


@app.command()
def demo(
    model: Annotated[str, typer.Option(metavar="MODEL", help=MODEL_HELP)] = "smollm2",
    tokens: Annotated[int, typer.Option(metavar="N", min=64, help="length of the answer at most")] = 124,
    question: Annotated[str, typer.Option(metavar="TEXT", help="what the swarm is asked")] = "Why is the sky blue?",
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """See a swarm lose a peer in mid-answer.

    Starts four peers on this machine, asks a question, kills a peer that is in use while it answers (SIGKILL), and
    compares the text with that of one process without a swarm. Exit code 0 only if they are the same, token for
    token.

    \b
    Example:  swarm demo
              swarm demo --json | tail -n 1 | jq .stall_ms
    """
    console = _console(as_json, verbose)
    with guarded(console):
        from swarm.commands.demo import demo as show

        sys.exit(show(console, model, tokens, question))


@app.command(no_args_is_help=True)
def simulate(
    scenario: Annotated[str, typer.Argument(metavar="SCENARIO", help="a name that --list shows, or a .toml file")] = "",
    seed: Annotated[int | None, typer.Option(metavar="N", min=0, help="of all that is random")] = None,
    settings: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="change a value of the scenario; may be repeated")
    ] = [],  # noqa: B006  typer's way
    growth: Annotated[bool, typer.Option("--growth", help="also what a plan costs among 100 to 10,000 peers")] = False,
    listed: Annotated[bool, typer.Option("--list", help="show the scenarios that come along")] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """See what routing does in a swarm of thousands, without one.

    Peers join, slow down, leave and die, clients ask and read, all on virtual time; what decides is the code that a
    real client and a real peer use. The same seed gives the same figures, but for the milliseconds of planning. Exit
    code 1 if an answer failed although every block had a peer at that moment.

    \b
    Example:  swarm simulate churn
              swarm simulate flash --set clients=64 --seed 7
              swarm simulate small --json | jq .tokens_per_s
    """
    console = _console(as_json, verbose)
    with guarded(console):
        from swarm.commands import simulate as command

        if listed:
            command.show_scenarios(console)
        else:
            sys.exit(command.simulate(console, scenario, settings, seed, growth))


def _check(join: str) -> None:
    """A typing error is told at once. Raises BadJoinCode."""
    from swarm.joincode import JoinCode

    JoinCode.parse(join)


def _console(as_json: bool, verbose: bool) -> Console:
    setup_logging(verbose)
    return Console(as_json=as_json, verbose=verbose)


def run(arguments: Sequence[str]) -> None:
    """Ends in SystemExit. With --json a wrong use of the options is a JSON object, too."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the program
    command: Any = typer.main.get_command(app)
    try:
        sys.exit(command.main(list(arguments), prog_name="swarm", standalone_mode=False) or 0)
    except UsageError as error:
        facts = {"event": "error", "error": "UsageError", "message": error.format_message(), "advice": ""}
        Console(as_json="--json" in arguments).event(facts)
        error.show()
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(INTERRUPTED)


def main() -> NoReturn:
    process(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
