"""The command line without a swarm: help, exit codes, named errors, the loop of a chat. No processes but its own."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from routing.errors import NoRoute, ProtocolError, TimedOut
from routing.types import Hop, Route
from swarm import demo as demonstration
from swarm.about import About, public_name
from swarm.cli import run
from swarm.commands import chat as chatting
from swarm.commands.asking import Answer, Asking
from swarm.figures import hop_times, longest_wait, rate, recovery_facts
from swarm.generation import Token
from swarm.healing import Recovery
from swarm.joincode import JoinCode
from swarm.session import HopTrace, StepTrace
from swarm.terminal import Console, guarded, harmless

A, B, C = "12D3KooWAbcdefXy3Qz1", "12D3KooWAbcdefPq77Lm", "12D3KooWAbcdefRr5Tt9"
PEER = "12D3KooWBYQ2jPVZbqGWGgZqeXrbPJkuCgRJ4qiVk4smg2ELpNjo"
CODE = JoinCode(bootstrap=(f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}",), fingerprint=bytes(32)).encode()
COMMANDS = ("serve", "generate", "chat", "status", "top", "route", "demo", "simulate")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """A command sets up logging, warnings and the environment for its process, which here is the tests'."""
    loggers = [logging.getLogger(), *map(logging.getLogger, ("routing", "swarm", "peer"))]
    levels, handlers = [logger.level for logger in loggers], logging.getLogger().handlers[:]
    before = dict(os.environ)
    with warnings.catch_warnings():
        yield
    logging.getLogger().handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    os.environ.clear()
    os.environ.update(before)


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        run(arguments)
    return int(ended.value.code or 0)


def python(code: str, **options: Any) -> subprocess.Popen[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], **{**streams, **options})


# -- help ----------------------------------------------------------------------------------------------------------


def test_help_comes_before_anything_slow_is_imported():
    process = python(
        "import sys, swarm.cli\n"
        "try: swarm.cli.run(['--help'])\n"
        "finally: print(sorted({'torch', 'transformers', 'hivemind.p2p', 'uvloop', 'numpy'} & set(sys.modules)))"
    )
    out, err = process.communicate(timeout=60)
    assert out.splitlines()[-1] == "[]" and not err
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "serve"])
def test_every_help_has_an_example(command, capsys):
    assert exit_code(command, "--help") == 0
    assert f"Example:  swarm {command}" in capsys.readouterr().out


def test_serve_hands_everything_to_the_peer(monkeypatch):
    run: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *arguments: run.append(arguments))
    assert exit_code("serve", "--json", "smollm2", "--blocks", "0:3", "--help") == 0
    arguments = ["--json", "smollm2", "--blocks", "0:3", "--help"]
    assert run == [(sys.executable, [sys.executable, "-P", "-m", "peer", *arguments])]


def test_version(capsys):
    assert exit_code("--version") == 0
    assert capsys.readouterr().out.startswith("swarm 0.")


# -- errors --------------------------------------------------------------------------------------------------------


def bad_model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "code", "name", "words"),
    [
        (("status", "--join", CODE[:-1] + "x"), 5, "BadJoinCode", "typing error"),
        (("chat", "smollm2", "--join", CODE[1:]), 5, "BadJoinCode", "typing error"),
        (("generate", "smollm2", "", "--join", CODE), 2, "BadInput", "prompt is empty"),
        (("generate", "smollm2", "x", "--join", CODE, "--temperature", "-1"), 2, "BadInput", "temperature"),
        (("generate", "smollm2", "x", "--join", CODE, "--dtype", "int3"), 2, "BadInput", "float32, bfloat16"),
        (("chat", "smollm2", "--join", CODE, "--stop", ""), 2, "BadInput", "stop"),
        (("generate", "smollm2", "x", "--join", CODE, "--objective", "best"), 2, "BadInput", "throughput, hops"),
        (("chat", "smollm2", "--join", CODE, "--region", "my home"), 2, "BadInput", "'my home' is not a region"),
        (("route", "--join", CODE, "--objective", "best"), 2, "BadInput", "latency, throughput, hops"),
        (("route", "--join", CODE, "--exact", "--dtype", "int3"), 2, "BadInput", "float32, bfloat16"),
        (("generate", "./nowhere", "x", "--join", CODE), 3, "ModelNotFound", "no directory or file ./nowhere"),
        (("chat", "nonsense", "--join", CODE), 3, "ModelNotFound", "neither a directory"),
        (("demo", "--model", "./nowhere"), 3, "ModelNotFound", "no directory or file ./nowhere"),
        (("generate", "WITHOUT_WEIGHTS", "x", "--join", CODE), 3, "ModelNotFound", "holds no weights"),
        (("generate", "smollm2", "x", "--nonsense"), 2, "UsageError", "No such option"),
        (("demo", "--tokens", "3"), 2, "UsageError", "64"),
        (("top", "--join", CODE, "--looks", "0"), 2, "UsageError", "1"),
        (("top", "--join", CODE[1:]), 5, "BadJoinCode", "typing error"),
        (("simulate", "nowhere"), 2, "BadInput", "there are churn, flash"),
        (("simulate", "./nowhere.toml"), 2, "BadInput", "cannot read ./nowhere.toml"),
        (("simulate", "small", "--set", "peers=none"), 2, "BadInput", "peers is a number from 1"),
        (("simulate", "small", "--set", "standby=cold"), 2, "BadInput", "none, inputs, warm"),
        (("simulate", "small", "--set", "peers"), 2, "BadInput", "key=value"),
        (("simulate", "small", "--set", "wings=2"), 2, "BadInput", "a scenario has no wings"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_named_errors(arguments, code, name, words, as_json, tmp_path, capsys):
    arguments = [bad_model(tmp_path) if each == "WITHOUT_WEIGHTS" else each for each in arguments]
    assert exit_code(*arguments, *(["--json"] if as_json else [])) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    if as_json:
        facts = json.loads(out.splitlines()[-1])
        assert facts["event"] == "error" and facts["error"] == name and words in facts["message"]
    else:
        assert words in err.replace("\n", " ") and not out


def ends(console: Console, error: BaseException) -> int:
    with pytest.raises(SystemExit) as ended, guarded(console):
        raise error
    return int(ended.value.code or 0)


def test_a_bug_says_that_it_is_one(capsys):
    assert ends(Console(), KeyError("key")) == 1
    err = capsys.readouterr().err
    assert "KeyError: 'key' (this is a bug" in err and "--verbose" in err and "Traceback" not in err
    assert ends(Console(verbose=True), KeyError("key")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_of_a_group_of_errors_the_named_one_counts(capsys):
    inner = ExceptionGroup("of tasks", [ValueError("x"), NoRoute("nobody serves 3:4")])
    assert ends(Console(), ExceptionGroup("of tasks", [inner])) == 4
    assert "NoRoute: nobody serves 3:4" in capsys.readouterr().err


def test_advice_of_a_stranger_cannot_steer_the_terminal(capsys):
    assert ends(Console(), NoRoute("a\x1b[2Jb", advice="c\x9b3Jd")) == 4
    err = capsys.readouterr().err
    assert "\x1b" not in err and "\x9b" not in err
    assert harmless("a\tb\nc\x07\x7f") == "a\tb\nc\ufffd\ufffd"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_an_interrupt_is_no_error(error, capsys):
    assert ends(Console(as_json=True), error) == 130
    out, err = capsys.readouterr()
    assert json.loads(out) == {"event": "interrupted"} and not err


def test_what_fails_because_of_an_interrupt_is_part_of_it(capsys):
    try:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("half done")
    except RuntimeError as error:
        assert ends(Console(), error) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_interrupt_does_not_wait_for_a_download():
    process = python(
        "import asyncio, sys, time\n"
        "from swarm.terminal import Console, guarded, process, run\n"
        "async def main():\n"
        "    download = asyncio.create_task(asyncio.to_thread(time.sleep, 300))\n"
        "    await asyncio.sleep(0)\n"
        "    print('ready', flush=True)\n"
        "    try: await download\n"
        "    finally: print('cleaned up', flush=True)\n"
        "def command():\n"
        "    with guarded(Console()): run(main())\n"
        "process(command)\n"
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "cleaned up\n", "interrupted\n")


def test_a_reader_that_leaves_ends_it_in_silence():
    process = python(
        "from swarm.terminal import Console, guarded, process\n"
        "def command():\n"
        "    with guarded(Console()):\n"
        "        while True: Console().plain('x' * 100)\n"
        "process(command)\n"
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 141
    process.stderr.close()


@pytest.mark.parametrize(
    "words",
    [
        "with guarded(Console()): Console().plain('x')",
        "with guarded(Console()): Console(as_json=True).event({})",
        "with guarded(Console()): fail(Console(as_json=True), BadInput('x'))",
        "print('help, for example')",
    ],
)
def test_an_output_that_cannot_be_written_is_told(words: str) -> None:
    with open("/dev/full", "w") as full:
        process = python(
            "from swarm.terminal import Console, fail, guarded, process\n"
            "from routing.errors import BadInput\n"
            f"def command():\n    {words}\n"
            "process(command)\n",
            stdout=full,
        )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 6 and len(err.splitlines()) == 2, err
    assert "No space left on device" in err and "Make room" in err


# -- figures -------------------------------------------------------------------------------------------------------


def step(route: Route, *compute_s: float, tokens: int = 1) -> StepTrace:
    pairs = zip(route, compute_s, strict=True)
    hops = [HopTrace(hop=hop, queue_s=0.001, compute_s=s, network_s=0.002) for hop, s in pairs]
    return StepTrace(at_s=0.0, total_s=sum(compute_s), tokens=tokens, epoch=0, hops=tuple(hops))


def test_the_times_of_a_route_are_medians_of_its_own_decode_steps():
    old, new = Route((Hop(A, 0, 2), Hop(B, 2, 4))), Route((Hop(A, 0, 2), Hop(C, 2, 4)))
    traces = [step(old, 9, 9), step(new, 7, 7, tokens=30), step(new, 1, 4), step(new, 2, 5), step(new, 3, 60)]
    assert [times.compute_s for times in hop_times(new, traces)] == [2, 5]
    assert [times.total_s for times in hop_times(new, [])] == [None, None]


def test_rates_and_waits():
    assert rate([1.0, 2.0, 4.0, 5.0]) == 0.75 and longest_wait([1.0, 2.0, 4.0, 5.0]) == 2.0
    assert rate([1.0]) == 0 and longest_wait([1.0]) == 0


def test_the_first_route_is_no_recovery():
    old, new = Route((Hop(A, 0, 4),)), Route((Hop(B, 0, 4),))
    first = Recovery(at_s=0, position=0, reason="first route", seconds=0.1, before=None, after=old)
    second = Recovery(at_s=1, position=7, reason="lost", seconds=0.25, before=old, after=new)
    facts = recovery_facts([first, second])
    assert [(each["position"], each["ms"]) for each in facts] == [(7, 250.0)]
    tokens = [Token(5, "a", 0, 10.5), Token(6, "b", 1, 11.0, "length")]
    answer = Answer(
        asked_s=10.0, prompt_tokens=3, tokens=tokens, route=new, traces=[], recoveries=[first, second]
    )  # fmt: skip
    assert answer.facts()["ids"] == [5, 6] and answer.facts()["first_token_s"] == 0.5
    assert "2 tokens at 2.0/s" in answer.summary() and "1 change of route (250 ms)" in answer.summary()


@pytest.mark.parametrize("n_blocks", [1, 2, 3, 4, 7, 12, 30, 80])
def test_any_peer_of_the_demo_can_go(n_blocks):
    spans = demonstration.spans(n_blocks)
    for gone in range(len(spans)):
        left = [span for index, span in enumerate(spans) if index != gone]
        assert all(any(block in span for span in left) for block in range(n_blocks))


def test_first_difference():
    assert demonstration.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert demonstration.first_difference([1, 2], [1, 2, 3]) == 2


# -- about ---------------------------------------------------------------------------------------------------------


def test_about_goes_there_and_back_and_nonsense_is_refused(tmp_path):
    about = About(model="m", family="llama", n_blocks=30, dtype="float32", bootstrap=("/ip4/1.2.3.4/tcp/5/p2p/x",))
    assert About.from_bytes(about.to_bytes()) == about
    for wrong in (About(model="m" * 999, family="f", n_blocks=3, dtype="d").to_bytes(), b"", b"\xc1", b"\x80",
                  About(model="m", family="f", n_blocks=0, dtype="d").to_bytes()):  # fmt: skip
        with pytest.raises(ProtocolError):
            About.from_bytes(wrong)
    folder = tmp_path / "mine"
    folder.mkdir()
    assert public_name(str(folder)) == "mine"  # where it lies is nobody's business
    assert public_name("org/name") == "org/name"


# -- chat ----------------------------------------------------------------------------------------------------------


class FakeSession:
    route = None
    traces: list[StepTrace] = []  # noqa: RUF012
    recoveries: list[Recovery] = []  # noqa: RUF012
    said: list[int] = []  # noqa: RUF012
    token_ids: list[int] = []  # noqa: RUF012


class FakeChat:
    def __init__(self, model: FakeModel):
        self.model, self.session, self.messages = model, FakeSession(), []
        model.log.append("open")

    def send(self, text: str, **_: Any) -> Iterator[Token]:
        self.model.log.append(text)
        self.messages.append({"role": "user", "content": text})
        if isinstance(self.model.trouble.get(text), Exception):
            raise self.model.trouble[text]
        yield Token(1, f"<{text}>", 0, 0.0)
        if text in self.model.trouble:
            raise self.model.trouble[text]
        yield Token(2, "!", 1, 1.0, "eos")

    def __exit__(self, *_: object) -> None:
        self.model.log.append("close")


class FakeModel:
    tokenizer = type("T", (), {"chat_template": "x"})
    max_context = 100

    def __init__(self) -> None:
        self.log: list[str] = []
        self.trouble: dict[str, BaseException] = {}

    def connect(self, *_: object, **__: object) -> FakeModel:
        return self

    def __enter__(self) -> FakeModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("left")

    def encode(self, messages: list[Any]) -> list[int]:
        return [0] * len(messages)

    def chat(self, system: str | None) -> FakeChat:
        return FakeChat(self)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    fake = FakeModel()
    monkeypatch.setattr(chatting, "SwarmModel", fake)
    return fake


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def talk(monkeypatch: pytest.MonkeyPatch, lines: list[Any], *, as_json: bool = False, terminal: bool = False) -> None:
    """A line that is an exception is raised instead of read."""
    rest = iter(lines)

    def read(_: str = "") -> str:
        line = next(rest, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", Terminal() if terminal else io.StringIO("".join(f"{line}\n" for line in lines)))
    chatting.chat(Console(as_json=as_json), Asking(model="m", join=CODE))


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_exact_sends_every_hidden_state_as_it_is(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(Asking, "check", lambda self: asked.append(self.connecting()["exact"]) or exit(3))
    words = [command, "m", *(["hello"] if command == "generate" else []), "--join", CODE]
    for options in ([], ["--exact"]):
        assert exit_code(*words, *options) == 3
    assert asked == [False, True]


def test_a_chat_from_a_pipe(model, monkeypatch, capsys):
    talk(monkeypatch, ["hello", "", "/reset", "/route", "/help", "again", "/exit", "unsaid"])
    out, err = capsys.readouterr()
    assert out == "<hello>!\n<again>!\n"
    assert model.log == ["open", "hello", "close", "open", "again", "close", "left"]
    assert "/reset" in err and "no route yet" in err and "> " not in out


def test_a_chat_as_json_has_an_object_a_turn(model, monkeypatch, capsys):
    talk(monkeypatch, ["hello", "/nonsense", "again"], as_json=True)
    out, err = capsys.readouterr()
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["text"] for answer in answers] == ["<hello>!", "<again>!"] and not err
    assert answers[0]["ids"] == [1, 2] and answers[0]["finish"] == "eos"


def test_an_error_ends_a_chat_from_a_pipe_but_not_one_with_somebody(model, monkeypatch, capsys):
    model.trouble["hello"] = TimedOut("the text was not finished within 1 s")
    with pytest.raises(TimedOut):
        talk(monkeypatch, ["hello", "again"])
    assert model.log[-2:] == ["close", "left"]
    capsys.readouterr()
    talk(monkeypatch, ["hello", "again"], terminal=True)
    out, err = capsys.readouterr()
    assert "<again>!" in out and "TimedOut: the text was not finished" in err


def test_ctrl_c_stops_the_answer_and_twice_the_chat(model, monkeypatch, capsys):
    model.trouble["long"] = KeyboardInterrupt()
    talk(monkeypatch, ["long", "again"], terminal=True)
    out, err = capsys.readouterr()
    assert "<long>\n" in out and "<again>!" in out and "Ctrl-C once more leaves" in err
    talk(monkeypatch, ["hello", KeyboardInterrupt(), "again", KeyboardInterrupt(), "more"], terminal=True)
    assert "<more>!" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        talk(monkeypatch, ["long", KeyboardInterrupt(), "never"], terminal=True)
    assert "never" not in model.log and model.log[-2:] == ["close", "left"]


def test_a_stopped_answer_is_told_as_json_too(model, monkeypatch, capsys):
    model.trouble["long"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        talk(monkeypatch, ["long"], as_json=True)
    answer = json.loads(capsys.readouterr().out.strip())
    assert answer["text"] == "<long>" and answer["finish"] is None
