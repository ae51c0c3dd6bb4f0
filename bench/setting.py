"""Owns what the parts share: the yardstick's process, the prompts, swarms with a client. Cleans all of it up."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.children import ROOT, Child, Client, LocalModel, make
from bench.prompts import PROMPTS, long_ids
from routing.simulation.scenario import BUSIEST, Fault, Scenario
from swarm.local import LocalSwarm
from tests.lab.lab import Lab
from tests.lab.swarm import LabSwarm
from tests.tiny import make_tiny

FORGETS, PREFILL, PACE = "BENCH_FORGETS", "BENCH_PREFILL", "BENCH_PACE"  # to bench.forgetful, .unlike and .paced
WARM_TOKENS = 8


class ForgetfulSwarm(LocalSwarm):
    def _program(self, name: str) -> str:
        return "bench.forgetful"


class UnlikeSwarm(LabSwarm):
    """The second half of its peers is slow with prompts."""

    def _program(self, name: str) -> str:
        return "bench.unlike" if 2 * int(name.split("-")[1]) >= len(self.spans) else "peer"


class PacedSwarm(LabSwarm):
    """One peer a host, as quick as a scenario says; without spans there, each chooses its blocks."""

    def __init__(self, lab: Lab, model: str, scenario: Scenario, options: Sequence[str] = ()):
        spans = scenario.spans or (None,) * scenario.peers
        super().__init__(lab, model, spans, threads=1, options=options, environment={"PYTHONPATH": str(ROOT)})
        self._scenario = scenario

    def _program(self, name: str) -> str:
        return "bench.paced"

    def _place(self, name: str) -> tuple[list[str], str]:
        before, address = super()._place(name)
        self._set_pace(name, 1.0)
        return [*before, "env", f"{PACE}={self._pace_of(name)}"], address

    def harm(self, fault: Fault, routes: Sequence[Sequence[str]]) -> None:
        """`routes`: of all sessions, as peer ids."""
        peer = self.peers[0 if fault.peer == BUSIEST else int(fault.peer)]
        if fault.peer == BUSIEST:
            peer = max(self.peers, key=lambda peer: sum(peer.peer_id in route for route in routes))
        if fault.kind == "kill":
            peer.kill()
        elif fault.kind == "leave":
            peer.ask_to_leave()
        else:
            self._set_pace(peer.log.stem, fault.factor)

    def _pace_of(self, name: str) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"{name}.pace"

    def _set_pace(self, name: str, factor: float) -> None:
        scenario, file = self._scenario, self._pace_of(name)
        speed = scenario.speeds[int(name.split("-")[1]) % len(scenario.speeds)]
        pace = {
            "block_s": scenario.block_s * factor / speed,
            "prefill_share": scenario.prefill_share,
            "slope": scenario.slope,
        }
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(pace))
        fresh.replace(file)  # whoever reads it meanwhile reads all of it


class Setting:
    """`with Setting(...)`: whatever it started has ended afterwards."""

    def __init__(self, model: str, rounds: int):
        self.model, self.rounds = model, rounds
        self._stack = ExitStack()
        self._folder: Path
        self._locals: dict[str, LocalModel] = {}
        self._prompts: list[list[int]] = []

    def __enter__(self) -> Setting:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        self._stack.callback(self.end_local)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def local(self) -> LocalModel:
        """The yardstick in fp32; it starts when it is first wanted, and then does nothing between its turns."""
        return self.local_in("float32")

    def local_in(self, dtype: str) -> LocalModel:
        if dtype not in self._locals:
            self._locals[dtype] = LocalModel(self.model, self._folder, dtype)
        return self._locals[dtype]

    @contextmanager
    def mixture_of_experts(self) -> Iterator[Setting]:
        """A setting like this one whose model is a small random mixture of experts, made for it."""
        with Setting("", self.rounds) as other:
            other.model = str(other._folder / "moe")
            make([other.model], other._folder)
            yield other

    @contextmanager
    def tiny(self, blocks: int, **overrides: Any) -> Iterator[Setting]:
        """A setting like this one whose model is a tiny random one, made for it: its tokens are bytes. `overrides` are
        keys of its configuration."""
        with Setting("", self.rounds) as other:
            other.model = str(make_tiny("llama", other._folder / "tiny", layers=blocks, tokenizer=True, **overrides))
            yield other

    def losses(self) -> dict[str, Any]:
        """What quantized weights change, by `bench.losses`."""
        measuring = Child("bench.losses", [self.model], self._folder)
        try:
            return measuring.next()
        finally:
            measuring.close()

    def end_local(self) -> None:
        """Before memory is measured: pages that it shares with a peer would not be counted in full."""
        while self._locals:
            self._locals.popitem()[1].close()

    def prompt(self, index: int) -> list[int]:
        """Token ids of a prompt of about 40 tokens."""
        if not self._prompts:
            self._prompts = self.local.encode(PROMPTS)
        return self._prompts[index % len(self._prompts)]

    def long_prompt(self, length: int, turn: int) -> list[int]:
        return long_ids([self.prompt(index) for index in range(len(PROMPTS))], length, turn)

    def warm(self, client: Client, prompts: Sequence[Sequence[int]], dtype: str = "float32") -> None:
        """The same few tokens on both sides, which count for nothing: the first run of a process pays for memory
        and caches that later ones find ready."""
        for prompt in prompts:
            self.local_in(dtype).generate(prompt, WARM_TOKENS)
            client.generate(prompt, WARM_TOKENS)

    @contextmanager
    def swarm(
        self, spans: Sequence[str], dtype: str = "float32", options: Sequence[str] = ()
    ) -> Iterator[LocalSwarm]:
        """One torch thread a peer, loopback."""
        with LocalSwarm(self.model, spans, threads=1, dtype=dtype, options=options) as swarm:
            yield swarm

    @contextmanager
    def forgetful_swarm(self, spans: Sequence[str], probability: float) -> Iterator[LocalSwarm]:
        """Whose peers lose a session's state at each step with that probability."""
        environment = {FORGETS: str(probability), "PYTHONPATH": str(ROOT)}
        with ForgetfulSwarm(self.model, spans, threads=1, environment=environment) as swarm:
            yield swarm

    @contextmanager
    def wide_swarm(self, spans: Sequence[str], delay_ms: float, dtype: str = "float32") -> Iterator[LabSwarm]:
        """On hosts of their own, so far apart one way."""
        with (
            Lab(hosts=1 + len(spans), delay_ms=delay_ms) as lab,
            LabSwarm(lab, self.model, spans, threads=1, dtype=dtype) as swarm,
        ):
            yield swarm

    @contextmanager
    def unlike_swarm(
        self, spans: Sequence[str], delay_ms: float, near_ms: float, times: float
    ) -> Iterator[LabSwarm]:
        """The first half of the peers is `delay_ms` away from all others, one way; between the other half and the
        client it is `near_ms`, and there prompts take `times` as long: they sleep for what they do not compute."""
        environment = {PREFILL: str(times), "PYTHONPATH": str(ROOT)}
        with Lab(hosts=1 + len(spans), delay_ms=delay_ms) as lab:
            near = [1, *range(2 + len(spans) // 2, 2 + len(spans))]
            for a, b in combinations(near, 2):
                lab.link(a, b, delay_ms=near_ms)
            with UnlikeSwarm(lab, self.model, spans, threads=1, environment=environment) as swarm:
                yield swarm

    @contextmanager
    def client(
        self, swarm: LocalSwarm, dtype: str = "float32", wire: str = "exact", wait_s: float = 0.0
    ) -> Iterator[Client]:
        before = swarm.lab.on(1) if isinstance(swarm, LabSwarm) else []
        client = Client(self.model, swarm.join_code, self._folder, dtype, before, wait_s, wire=wire)
        try:
            yield client
        finally:
            client.close()
