"""What an owner meets that nobody wishes for: no memory, no room on the disk, a device that fails, a race for a gap."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swarm.identity import Identity
from swarm.local import LocalPeer, LocalSwarm
from swarm.model import SwarmModel
from tests.whole.failing_device import GONE
from tests.whole.launched import PATIENCE_S, finish
from tests.whole.reference import Reference

pytestmark = pytest.mark.processes

HERE = ["--host", "127.0.0.1", "--threads", "1"]


# -- memory ---------------------------------------------------------------------------------------------------


def make_enormous(folder: Path) -> Path:
    """A model of one block that fits no machine. Its file is all hole, so that it takes no room here."""
    config = LlamaConfig(
        vocab_size=16, hidden_size=1 << 19, intermediate_size=1 << 19, num_attention_heads=1 << 13,
        num_key_value_heads=1 << 13, num_hidden_layers=1,
    )  # fmt: skip
    header, at = {}, 0
    with torch.device("meta"):
        for name, tensor in LlamaForCausalLM(config).state_dict().items():
            end = at + 2 * tensor.numel()
            header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, end]}
            at = end
    written = json.dumps(header).encode()
    folder.mkdir()
    config.save_pretrained(folder)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(written)) + written)
        file.truncate(8 + len(written) + at)
    return folder


def test_a_model_of_which_not_one_block_fits_is_refused_before_it_is_read(launch: Any, tmp_path: Path) -> None:
    model = str(make_enormous(tmp_path / "enormous"))
    chooses, chosen = launch("serve", model, *HERE), launch("serve", model, "--blocks", "0:1", "--json", *HERE)
    shown = finish(chooses)
    assert shown.code == 6 and not shown.out, shown.err
    assert "NotEnoughMemory: one block takes" in shown.err and "are free" in shown.err and "--quantize" in shown.err
    shown = finish(chosen)
    assert shown.code == 6 and shown.facts["error"] == "NotEnoughMemory" and "blocks 0:1 take" in shown.facts["message"]


# -- the disk -------------------------------------------------------------------------------------------------

FULL = """
mount -t tmpfs -o size=1m none "$HOME" && cp -r "$KEPT/." "$HOME" && ! cat /dev/zero > "$HOME/much" 2> /dev/null
exec "$@"
"""


def serve(launch: Any, *arguments: str, **options: Any) -> tuple[dict[str, Any], str]:
    """What a peer says when it serves, and what it said on stderr until it was asked to end."""
    process = launch("serve", *arguments, "--json", *HERE, **options)
    assert process.stdout is not None
    serving = json.loads(process.stdout.readline() or "{}")
    process.send_signal(signal.SIGINT)
    shown = finish(process)
    assert (serving.get("event"), shown.code, shown.facts) == ("serving", 0, {"event": "left"}), shown.err
    return serving, shown.err


def test_what_was_kept_is_damaged_and_the_disk_is_full(launch: Any, tiny: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a small disk of its own needs root, and util-linux")
    kept, home, key = tmp_path / "kept", tmp_path / "home", tmp_path / "peer.key"
    for folder in (kept, home):
        folder.mkdir()
    Identity.load_or_create(key)
    common = [str(tiny), "--identity", str(key)]
    first, said = serve(launch, *common, env={**os.environ, "HOME": str(kept)})
    assert not said
    [measured] = (kept / ".cache/swarm/measured").iterdir()
    measured.write_bytes(measured.read_bytes()[:-9])
    options = {
        "env": {**os.environ, "HOME": str(home), "KEPT": str(kept)},
        "before": ["unshare", "-m", "sh", "-c", FULL, "sh"],
    }
    again, said = serve(launch, *common, **options)
    assert again["span"] == first["span"] and again["speed"] != first["speed"]
    warnings = said.splitlines()
    assert len(warnings) == 2, said
    assert f"{measured.name} is damaged" in warnings[0] and "measuring again" in warnings[0]
    assert "No space left on device" in warnings[1] and "going on without" in warnings[1]
    # Without an identity of its own it cannot even begin.
    shown = finish(launch("serve", str(tiny), *HERE, **options))
    assert shown.code == 6 and "StartError" in shown.err and "No space left on device" in shown.err, shown.err
    assert "has room" in shown.err


# -- the device -----------------------------------------------------------------------------------------------


class FailingSwarm(LocalSwarm):
    def _program(self, name: str) -> str:
        return "tests.whole.failing_device"


def last_event(peer: LocalPeer) -> dict[str, Any]:
    assert peer.process.stdout is not None
    return json.loads(peer.process.stdout.read().splitlines()[-1])


@pytest.mark.parametrize(("device", "named"), [("cpu", "cpu"), ("cpu,cpu", "cpu (blocks 5:6)")])
async def test_a_device_is_lost_in_mid_answer(device: str, named: str, tiny: Path, local: Reference) -> None:
    """The text goes on elsewhere; the peer says goodbye to the swarm and tells its owner why. Of two devices it is the
    second, which has one block of three."""
    with FailingSwarm(str(tiny), ["0:3", "3:6", "3:6"], options=["--device", device]) as swarm:
        code = swarm.join_code
        assert swarm.peers[1].facts["devices"] == ([named] if device == "cpu" else ["cpu (blocks 3:5)", named])
        async with SwarmModel.connect(str(tiny), join=code) as model, model.session() as session:
            ids, got = model.encode("The peers that stay"), []
            async for token in session.generate(ids, max_new_tokens=40, ignore_eos=True):
                got.append(token.id)
                if len(got) == 20:
                    assert session.route is not None
                    lost = swarm.by_id(session.route[1].peer_id)
                    lost.process.send_signal(signal.SIGUSR1)
            local.check(ids, got, 40)
            assert lost.peer_id not in session.route.peers
            assert lost.process.wait(PATIENCE_S) == 6
            told = last_event(lost)
            assert told["error"] == "DeviceLost" and told["message"] == f"{named} does not compute any more: {GONE}"
            await model._client.refresh()
            assert lost.peer_id not in {record.peer_id for record in model._client.records()}


# -- others ---------------------------------------------------------------------------------------------------


def test_two_that_race_for_a_gap_do_not_take_the_same_blocks(tiny: Path) -> None:
    with LocalSwarm(str(tiny), [None], options=["--most-blocks", "2", "--rebalance", "0"]) as swarm:
        racing = [swarm.launch(None) for _ in range(2)]
        for peer in racing:
            peer.wait_serving()
        assert [swarm.peers[0].facts["span"], *sorted(peer.facts["span"] for peer in racing)] == ["0:2", "2:4", "4:6"]
