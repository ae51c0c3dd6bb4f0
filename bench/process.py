"""Owns the figures of a peer as a process: its memory, how many processes it is, how long until it serves."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from bench.figures import Figure
from bench.prompts import PROMPTS
from bench.setting import Setting

TWO_PEERS = ("0:15", "15:30")
NEW = 64
MEMORY_RUNS = 3
MIB = 2**20


def memory(setting: Setting) -> list[Figure]:
    """A peer of 15 blocks after a generation of 64 tokens, when the other peer, the client and the local model have
    ended: pages shared with them would be counted only in part. This process holds no torch."""
    setting.end_local()
    processes: list[float] = []
    beyond: dict[str, list[float]] = {"Pss": [], "Rss": [], "Pss_Anon": [], "Pss_File": []}
    daemon: list[float] = []
    for _ in range(min(MEMORY_RUNS, setting.rounds)):
        with setting.swarm(TWO_PEERS) as swarm:
            with setting.client(swarm) as client:
                client.generate(PROMPTS[0], NEW)
            peer, other = swarm.peers
            other.leave()
            family = [peer.pid, *(child.pid for child in psutil.Process(peer.pid).children(recursive=True))]
            sizes = [smaps_rollup(Path(f"/proc/{pid}/smaps_rollup").read_text()) for pid in family]
            weights = peer.facts["weights_bytes"]
        processes.append(len(family))
        for kind, values in beyond.items():
            held = sum(size[kind] for size in sizes)
            values.append((held if kind == "Pss_File" else held - weights) / MIB)
        daemon.append(sum(size["Pss"] for size in sizes[1:]) / MIB)
    note = f"beyond {weights / MIB:.0f} MiB of weights, after {NEW} tokens"
    return [
        Figure.of_median("processes of a peer", "processes", processes, "with its p2pd"),
        Figure.of_median("PSS of one peer alone beyond its weights, 15 blocks fp32", "MiB", beyond["Pss"], note),
        Figure.of_median(
            "RSS of the same", "MiB", beyond["Rss"],
            "an upper bound: strangers on the machine that use the same libraries lower PSS",
        ),
        Figure.of_median("of that PSS: own memory", "MiB", beyond["Pss_Anon"], "weights left out"),
        Figure.of_median("of that PSS: files (libraries, checkpoint)", "MiB", beyond["Pss_File"]),
        Figure.of_median("of that PSS: p2pd", "MiB", daemon),
    ]  # fmt: skip


def launch(setting: Setting) -> list[Figure]:
    """From the start of the process to its word that it serves."""
    with setting.swarm(TWO_PEERS[:1]):
        pass  # converts what is kept beside the checkpoint, and brings the files into the page cache
    founder: list[float] = []
    joiner: list[float] = []
    for _ in range(setting.rounds):
        # One after the other: peers that are launched together wait for the founder's join code.
        with setting.swarm(TWO_PEERS[:1]) as swarm:
            swarm.add(TWO_PEERS[1])
            for peer, values in zip(swarm.peers, (founder, joiner), strict=True):
                values.append(peer.served_at - peer.launched_at)
    note = "model on disk, converted and in the page cache by one launch before"
    return [
        Figure.of_median("launch to serving, founder, 15 blocks", "s", founder, note),
        Figure.of_median("launch to serving, joiner, 15 blocks", "s", joiner, note),
    ]


def smaps_rollup(text: str) -> dict[str, int]:
    """Bytes by name; the file gives kB."""
    sizes = {}
    for line in text.splitlines()[1:]:
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    return sizes


def machine() -> str:
    """What the figures were measured on, and how busy it was."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
