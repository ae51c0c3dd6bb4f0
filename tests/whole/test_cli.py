"""The command line against real peer processes: what a user sees, exit codes, and Ctrl-C as a terminal sends it."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarm.cli import run
from swarm.joincode import JoinCode
from swarm.local import LocalSwarm
from tests.swarm.test_cli import restored  # noqa: F401  a fixture for each test here
from tests.whole.launched import PATIENCE_S, Result, finish
from tests.whole.reference import Reference

pytestmark = pytest.mark.processes

SPANS = ("0:4", "3:6")


@pytest.fixture(scope="module")
def swarm(tiny: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(str(tiny), SPANS, options=("--region", "EU")) as swarm:
        yield swarm


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Any:
    """A command in this process: its imports are paid already."""

    def command(*arguments: str) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(arguments)
        out, err = capfd.readouterr()
        return Result(int(ended.value.code or 0), out, err)

    return command


# -- what it prints ------------------------------------------------------------------------------------------------


def test_status(command, swarm):
    shown = command("status", "--join", swarm.join_code)
    assert shown.code == 0 and not shown.err
    assert "All 6 blocks are served" in shown.out and str(swarm.peers[0].peer_id)[-6:] in shown.out
    facts = command("status", "--json", "--join", swarm.join_code).facts
    assert facts["complete"] and facts["coverage"] == [1, 1, 1, 2, 1, 1] and facts["n_blocks"] == 6
    assert facts["family"] == "llama" and [peer["blocks"] for peer in facts["peers"]] == list(SPANS)
    assert all(peer["answers"] and peer["rtt_ms"] > 0 and peer["cache_free"] for peer in facts["peers"])
    for peer in facts["peers"]:
        assert (peer["dtype"], peer["region"]) == ("float32", "eu")
        assert peer["sessions"] == 0 and (peer["reason"] is None) == (peer["condition"] == "serving")
        assert peer["condition"] in ("serving", "slow")  # other work on this machine may slow one of them down
    # The code of now names both peers, so it still works when either of them is gone.
    named = {address.rpartition("/p2p/")[2] for address in JoinCode.parse(facts["join_code"]).bootstrap}
    assert named == {peer.peer_id for peer in swarm.peers}


def test_top_as_json_has_an_object_a_look(command, swarm):
    shown = command("top", "--json", "--every", "0.1", "--looks", "2", "--join", swarm.join_code)
    looks = [json.loads(line) for line in shown.out.splitlines()]
    assert shown.code == 0 and not shown.err and [look["event"] for look in looks] == ["look", "look"]
    for look in looks:
        assert all(change["what"] == "state" for change in look["changed"])  # slow, on a busy machine
        assert look["complete"] and [peer["blocks"] for peer in look["peers"]] == list(SPANS)


def test_generate(command, swarm, tiny, local: Reference, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("The quick brown\n"))
    common = ["--join", swarm.join_code, "--max-new-tokens", "20", "--raw"]
    shown = command("generate", str(tiny), "-", *common)
    ids = local.ids("The quick brown")
    expected = local.generate(ids, max_new_tokens=20, do_sample=False)
    assert shown.code == 0 and shown.out == local.tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert len(shown.err.splitlines()) == 1 and f"{len(expected)} tokens at" in shown.err
    facts = command("generate", str(tiny), "The quick brown", *common, "--json", "--trace").facts
    assert facts["ids"] == expected and facts["recoveries"] == [] and facts["tokens_per_s"] > 0
    peers = {peer.peer_id for peer in swarm.peers}
    assert {hop["peer"] for hop in facts["route"]} == peers
    assert [step["tokens"] for step in facts["trace"]] == [len(ids), *[1] * (len(expected) - 1)]
    assert all({hop["peer"] for hop in step["hops"]} == peers for step in facts["trace"])
    traced = command("generate", str(tiny), "The quick brown", *common, "--trace")
    assert traced.out == shown.out and f"The slowest of {len(expected) - 1} tokens" in traced.err
    assert all(peer[-6:] in traced.err for peer in peers)


def test_generate_asks_through_the_chat_template(command, swarm, tiny, local: Reference):
    facts = command("generate", str(tiny), "Hi", "--json", "--max-new-tokens", "4", "--join", swarm.join_code).facts
    messages = [{"role": "user", "content": "Hi"}]
    ids = local.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert facts["prompt_tokens"] == len(ids)
    assert facts["ids"] == local.generate(ids, max_new_tokens=4, do_sample=False)


def test_route(command, swarm):
    shown = command("route", "--join", swarm.join_code, "--explain")
    assert shown.code == 0 and "ms from here" in shown.out
    assert all(peer.peer_id[-6:] in shown.out for peer in swarm.peers) and "each of its peers is needed" in shown.out
    assert "hidden states go in fp32" in shown.out
    facts = command("route", "--json", "--join", swarm.join_code).facts
    # Both serve block 3; it goes to the one that was faster when it started.
    assert [hop["blocks"] for hop in facts["route"]["hops"]] in (["0:4", "4:6"], ["0:3", "3:6"])
    assert facts["route"]["ms"] == pytest.approx(
        sum(sum(value for name, value in hop.items() if name.endswith("_ms")) for hop in facts["route"]["hops"]),
        abs=0.1,
    )


def test_a_route_for_what_is_asked(command, swarm):
    few = command(
        "route", "--json", "--objective", "hops", "--exact", "--region", "eu", "--join", swarm.join_code
    ).facts  # fmt: skip
    assert len(few["route"]["hops"]) == 2 and not few["left_out_by"]
    many = command("route", "--objective", "throughput", "--explain", "--join", swarm.join_code)
    assert "rows a second where many flow at once" in many.out
    nobody = command("route", "--region", "us", "--join", swarm.join_code)
    assert nobody.code == 4 and "left out by region (2 peers)" in nobody.err
    other = command("route", "--exact", "--dtype", "bfloat16", "--json", "--join", swarm.join_code)
    assert other.code == 4 and "left out by exact (2 peers)" in other.facts["message"]


def test_chat_from_a_pipe(command, swarm, tiny, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n/route\nMore\n"))
    shown = command("chat", str(tiny), "--json", "--max-new-tokens", "5", "--join", swarm.join_code)
    first, second = map(json.loads, shown.out.splitlines())
    assert shown.code == 0 and not shown.err
    assert second["prompt_tokens"] > first["prompt_tokens"] + first["tokens"]


# -- what goes wrong -----------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context(command, swarm, tiny):
    shown = command("generate", str(tiny), "x" * 600, "--join", swarm.join_code)
    assert shown.code == 3 and "PromptTooLong: 6" in shown.err and "Shorten the prompt" in shown.err and not shown.out


def test_another_model_than_the_swarms(command, swarm, tmp_path):
    from tests.tiny import make_tiny

    other = make_tiny("llama", tmp_path, layers=6, seed=1, tokenizer=True)
    shown = command("generate", str(other), "x", "--json", "--join", swarm.join_code)
    assert shown.code in (3, 5) and shown.facts["error"] in ("DamagedWeights", "WrongModel")


def test_what_serve_refuses(launch, swarm, tiny):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        here = ["--host", "127.0.0.1"]
        in_use = launch("serve", str(tiny), "--port", port, *here)
        outside = launch("serve", str(tiny), "--blocks", "4:9", "--json", *here)
        typo = launch("serve", str(tiny), "--join", swarm.join_code[:-2], *here)
        small = launch("serve", str(tiny), "--max-memory", "1M", "--cache", "1", *here)
        shown = finish(in_use)
        assert shown.code == 6 and port in shown.err and "PortInUse" in shown.err and "--port" in shown.err
    shown = finish(small)
    assert shown.code == 6 and "NotEnoughMemory" in shown.err and "--max-memory allows 1 MiB" in shown.err
    shown = finish(outside)
    assert shown.code == 2 and shown.facts["error"] == "BadInput" and "the model has 6" in shown.facts["message"]
    shown = finish(typo)
    assert shown.code == 5 and "BadJoinCode" in shown.err


# -- Ctrl-C --------------------------------------------------------------------------------------------------------


def test_ctrl_c_says_goodbye(command, launch, swarm, tiny):
    """To the whole process group, as a terminal does it: p2pd has to survive it until the goodbye is said."""
    here = ["--host", "127.0.0.1", "--metrics-port", "0", "--join", swarm.join_code]
    process = launch("serve", str(tiny), "--blocks", "1:3", "--json", "--quantize", "int8", *here)
    assert process.stdout is not None
    serving = json.loads(process.stdout.readline())
    assert serving["dtype"] == "float32/int8"
    assert serving["weights_bytes"] < swarm.peers[0].facts["weights_bytes"] / 6  # half as many blocks, 9 bits for 32
    assert serving["metrics"].startswith("http://127.0.0.1:")
    with urllib.request.urlopen(serving["metrics"], timeout=PATIENCE_S) as answer:
        page = answer.read().decode()
    model = f'model="{tiny.name}"'
    assert f'blocks="1:3",{model},peer_id="{serving["peer_id"]}"' in page and 'peer_state="serving"} 1.0' in page
    assert f"swarm_peer_record_sequence{{{model}," in page and "swarm_peer_p2pd_restarts_total 0.0" in page
    group = [each for each in psutil.process_iter(["pid"]) if _group_of(each.pid) == process.pid]
    assert len(group) == 1, "p2pd must not get what a terminal sends to the peer"
    os.killpg(process.pid, signal.SIGINT)
    shown = finish(process)
    assert shown.code == 0 and shown.facts == {"event": "left"} and not shown.err
    facts = command("status", "--json", "--join", swarm.join_code).facts
    assert {"peer": serving["peer_id"], "blocks": "1:3"} in facts["left"]
    assert serving["peer_id"] not in [peer["peer"] for peer in facts["peers"]]


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def test_ctrl_c_stops_generate(launch, swarm, tiny):
    process = launch("generate", str(tiny), "Hi", "--raw", "--max-new-tokens", "400", "--join", swarm.join_code)
    assert process.stdout is not None
    process.stdout.read(1)
    os.killpg(process.pid, signal.SIGINT)
    shown = finish(process)
    assert shown.code == 130 and shown.err == "interrupted\n"


class Typist:
    """Somebody at a terminal in which a command runs."""

    def __init__(self, launch: Any, *arguments: str):
        self._terminal, other = pty.openpty()
        self._process = launch(*arguments, stdin=other, stdout=other, stderr=other)
        os.close(other)
        self.screen = ""

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def press_ctrl_c(self) -> None:
        os.killpg(self._process.pid, signal.SIGINT)

    def wait_for(self, words: str, *, after: int = 0) -> int:
        """Where `words` end on the screen."""
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.screen[after:]:
            ready, _, _ = select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{words!r} did not come: {self.screen!r}"
            try:
                self.screen += os.read(self._terminal, 65536).decode(errors="replace")
            except OSError:  # Linux's way to say that nobody is there any more
                pytest.fail(f"it has ended before {words!r}: {self.screen!r}")
        return self.screen.index(words, after) + len(words)

    def end(self) -> int:
        """The exit code."""
        code = self._process.wait(PATIENCE_S)
        os.close(self._terminal)
        return code


def test_a_chat_in_a_terminal(launch, swarm, tiny):
    typist = Typist(launch, "chat", str(tiny), "--join", swarm.join_code)
    at = typist.wait_for("> ")
    typist.type("Tell me all\n")
    at = typist.wait_for("Tell me all\r\n", after=at)
    at = typist.wait_for("\N{REPLACEMENT CHARACTER}", after=at)  # what a random model says is hardly ever a character
    typist.press_ctrl_c()
    at = typist.wait_for("Ctrl-C once more leaves", after=at)
    typist.type("/route\n")
    at = typist.wait_for(swarm.peers[1].peer_id[-6:], after=at)
    typist.type("/exit\n")
    assert typist.end() == 0
    assert "Traceback" not in typist.screen


def test_top_in_a_terminal(launch, swarm):
    typist = Typist(launch, "top", "--every", "0.2", "--join", swarm.join_code)
    at = typist.wait_for(swarm.peers[0].peer_id[-6:])
    typist.wait_for(swarm.peers[0].peer_id[-6:], after=at)  # drawn again
    typist.press_ctrl_c()
    assert typist.end() == 0
    assert "Traceback" not in typist.screen


def test_a_chat_that_is_kept_in_a_file(command, swarm, tiny, tmp_path, monkeypatch):
    path = tmp_path / "chat.json"
    once = "chat", str(tiny), "--max-new-tokens", "8", "--join", swarm.join_code, "--save", str(path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert command(*once).code == 0
    saved = json.loads(path.read_text())
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("And now?\n"))
    shown = command(*once)
    assert shown.code == 0 and f"going on with the 2 messages of {path}" in shown.err
    assert json.loads(path.read_text())["messages"][:2] == saved["messages"]
    path.write_text("{}")
    shown = command(*once)
    assert shown.code == 2 and "not a saved session" in shown.err


def test_a_peer_that_others_cannot_connect_to_tells_its_owner(launch, swarm, tiny):
    with socket.socket() as closed:  # nobody listens there, and nobody else can take the port
        closed.bind(("127.0.0.3", 0))
        address = f"127.0.0.3:{closed.getsockname()[1]}"
        here = ["--host", "127.0.0.3", "--announce", address]  # another address than the swarm's
        process = launch("serve", str(tiny), "--blocks", "0:1", "--json", "--join", swarm.join_code, *here)
        late = threading.Timer(PATIENCE_S, process.kill)
        late.start()
        events = [json.loads(process.stdout.readline() or "{}") for _ in range(2)]
        late.cancel()
        os.killpg(process.pid, signal.SIGINT)
        assert finish(process).code == 0
    assert [event.get("event") for event in events] == ["serving", "unreachable"]
    assert events[1]["addresses"] == [{"address": address, "reason": "refused"}] and "--announce" in events[1]["advice"]


# -- the swarm changes (last: it is not the same afterwards) ----------------------------------------------------------


def test_blocks_that_nobody_serves(command, swarm, tiny, local: Reference):
    code = swarm.join_code
    assert swarm.peers[1].leave() == 0
    shown = command("status", "--join", code)
    assert shown.code == 4 and "Nobody serves 4:6" in shown.out
    shown = command("top", "--looks", "1", "--join", code)
    assert shown.code == 4 and "Nobody serves 4:6" in shown.out and "1 of 1 peers serve" in shown.out
    shown = command("generate", str(tiny), "Hi", "--raw", "--join", code)
    assert shown.code == 4 and "4:6" in shown.err and "--wait" in shown.err and not shown.out
    shown = command("generate", str(tiny), "Hi", "--raw", "--join", code, "--wait", "0.5", "--json")
    assert shown.code == 4 and shown.facts["error"] == "NoRoute" and "4:6" in shown.facts["message"]
    helper = threading.Thread(target=swarm.add, args=("4:6",))
    helper.start()
    shown = command("generate", str(tiny), "Hi", "--raw", "--max-new-tokens", "5", "--join", code, "--wait", "120")
    helper.join()
    expected = local.generate(local.ids("Hi"), max_new_tokens=5, do_sample=False)
    assert shown.code == 0 and shown.out == local.tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert "nobody serves blocks 4:6; waiting up to 120 s" in shown.err


def test_the_demo(launch):
    shown = finish(launch("demo", "--json", "--tokens", "64"))
    assert shown.code == 0 and not shown.err
    facts = shown.facts
    assert facts["tokens_identical"] is True and facts["tokens"] == 64 and facts["tokens_per_s"] > 0
    killed, before, after = facts["killed"], facts["route_before"], facts["route_after"]
    assert killed in [hop["peer"] for hop in before] and killed not in [hop["peer"] for hop in after]
    assert all(hop["ms"] > 0 for hop in [*before, *after])
    assert facts["recoveries"] and facts["stall_ms"] > 0


# -- weights from other peers --------------------------------------------------------------------------------------


def test_a_peer_without_the_model_gets_its_blocks_from_the_others(launch, swarm, tmp_path):
    """Blocks 1:5, of which no other peer has all; started again when it has them on its disk."""
    elsewhere = {**os.environ, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    absent = ["serve", "nobody/tiny", "--join", swarm.join_code, "--host", "127.0.0.1", "--json"]
    peer = launch(*absent, "--blocks", "1:5", env=elsewhere)
    assert peer.stdout is not None
    serving = json.loads(peer.stdout.readline())
    assert serving["event"] == "serving" and serving["span"] == "1:5", serving
    peer.send_signal(signal.SIGINT)
    assert finish(peer).code == 0
    [model] = [folder for folder in (tmp_path / ".cache/swarm/models").iterdir() if folder.is_dir()]
    assert {file.name for file in model.iterdir()} == {"config.json", "model.safetensors"}
