"""The programmer's door: a model that a swarm runs.

    async with SwarmModel.connect("smollm2", join=code) as model:
        async for token in model.generate("The capital of France is", max_new_tokens=32):
            print(token.text, end="", flush=True)

Owns how prompts become tokens and sessions become text. `swarm.sync` is the same without `async`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import Any

from routing.constraints import Constraints
from routing.errors import BadInput, TimedOut
from routing.explain import Explanation
from routing.types import Hop, Objective, PeerId, PeerRecord, Route
from swarm import saved
from swarm.checkpoint import Checkpoint, open_checkpoint
from swarm.client import ClientConfig, SwarmClient
from swarm.codec import COMPUTE_DTYPES
from swarm.families import Family, family_of, text_config
from swarm.generation import GenerationResult, Token, Unfinished, generate
from swarm.healing import Recovery
from swarm.joincode import JoinCode
from swarm.progress import Progress, silent
from swarm.sampling import GenerationSettings
from swarm.session import Session, SessionConfig, StepTrace
from swarm.text import Messages, chat_ids, next_turn_ids

Prompt = str | Sequence[int] | Messages
"""Text, token ids, or a chat: `[{"role": "user", "content": "Hello"}]`."""

Hear = Callable[[Token], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """A peer as this client knows it: its record, and what was measured. Times in seconds.

    `render.status_table` takes these as they are.
    """

    record: PeerRecord
    rtt_s: float | None
    decode_s: float  # one token through one block, measured or claimed
    prefill_s: float
    banned: bool

    @property
    def reachable(self) -> bool:
        return self.rtt_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmStatus:
    peers: tuple[PeerStatus, ...]
    coverage: tuple[int, ...]  # peers that serve each block

    @property
    def uncovered(self) -> tuple[int, ...]:
        """Blocks that nobody serves."""
        return tuple(block for block, count in enumerate(self.coverage) if count == 0)


class SwarmModel:
    """A model served by a swarm. Make it with `connect`, and use it inside `async with`."""

    def __init__(self, model: str, join: str, client: ClientConfig, session: SessionConfig, progress: Progress):
        self._name, self._join = model, JoinCode.parse(join)
        self._client_config, self._session_config, self._progress = client, session, progress
        self._client: SwarmClient
        self.tokenizer: Any
        self.generation_config: Any

    @classmethod
    def connect(
        cls,
        model: str,
        *,
        join: str,
        dtype: str = "float32",
        wire: str = "auto",
        wait_s: float = 0.0,
        recovery_s: float = 60.0,
        threads: int | None = None,
        direct: bool = True,
        share_prefixes: bool = True,
        standby: str = "inputs",
        only: Iterable[PeerId] | None = None,
        never: Iterable[PeerId] = (),
        trusted: Iterable[PeerId] | None = None,
        region: str | Iterable[str] | None = None,
        exact: bool = False,
        objective: str = "latency",
        progress: Progress = silent,
    ) -> SwarmModel:
        """A model of the swarm that `join` names; nothing happens before `async with`.

        `model`: a directory, .gguf file, hub id or "smollm2"; only its embeddings and head are read here.
        `dtype` of these, "float32" or "bfloat16". `wire`, how hidden states are written: "auto" as `dtype` is, but on
        ways that were measured to be slow in fewer bytes, which changes about one token in 250 (bfloat16 or 8 bits);
        "exact" always as `dtype`; or in "float32", "bfloat16" or "int8" everywhere.
        `wait_s`: how long to wait for blocks that nobody serves. `recovery_s`: how long one change of route may
        take. `threads` for the head. `share_prefixes`: sessions that begin alike share what their peers computed, and
        peers keep it for ten minutes after a session is closed, or until they need the room; nobody but this client
        can use it. `standby`: for each hop a second peer, where there is one, is sent what that hop is sent. With
        "inputs" it keeps that, so that after a loss nothing is sent anew; with "warm" it computes it too when it has
        nothing else to do, so that a loss holds up the text for a few round trips however long it is; with "none"
        there is no such peer. Peer ids that routes are made of: `only` these, `never` those, and for the first and the
        last block, which tell most of a text, only `trusted` ones. `region`, one or several: only peers that state one
        of them (`swarm serve --region`). `exact`: only peers that state that they compute in `dtype`, and `wire` is
        "exact". Rather no route (NoRoute) than another. `objective`: routes of the least "latency"; of the most
        "throughput", for many prompts at once, more than a chain has hops; or of the fewest "hops", where each link
        costs.
        Entering raises JoinError, ModelError, DaemonFailed and their kin.
        """
        if dtype not in COMPUTE_DTYPES:
            raise BadInput(f"dtype is one of {', '.join(COMPUTE_DTYPES)}, not {dtype!r}")
        if exact and wire not in ("auto", "exact"):
            raise BadInput(f"exact sends hidden states as they are, and wire is {wire!r}", advice="Leave one out.")
        client = ClientConfig(dtype=COMPUTE_DTYPES[dtype], threads=threads, direct=direct)
        session = SessionConfig(
            wire="exact" if exact else wire,
            wait_s=wait_s,
            recovery_s=recovery_s,
            share_prefixes=share_prefixes,
            standby=standby,
            constraints=Constraints.of(
                only=only, never=never, trusted=trusted, region=region, exact=dtype if exact else None
            ),
            objective=Objective.parse(objective),
        )
        return cls(model, join, client, session, progress)

    async def __aenter__(self) -> SwarmModel:
        checkpoint = await asyncio.to_thread(open_checkpoint, self._name, progress=self._progress)
        family = family_of(checkpoint.config)
        client = self._make_client(checkpoint, family)
        tokenizer = asyncio.create_task(asyncio.to_thread(checkpoint.tokenizer))
        try:
            await client.open()
        finally:
            await asyncio.wait([tokenizer])
        try:
            self.tokenizer, self.generation_config = tokenizer.result(), checkpoint.generation_config()
        except BaseException:
            await client.close()
            raise
        self._client = client
        return self

    def _make_client(self, checkpoint: Checkpoint, family: Family) -> SwarmClient:
        """The seam for tests whose swarm has no DHT."""
        return SwarmClient(checkpoint, family, self._join, self._client_config)

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    # -- the swarm -------------------------------------------------------------------------------------------

    @property
    def max_context(self) -> int:
        """Tokens that a sequence may have, prompt and answer together."""
        config = text_config(self._client.checkpoint.config)
        return int(getattr(config, "max_position_embeddings", None) or 2**31)

    async def status(self) -> SwarmStatus:
        """The swarm as it is now: read from the directory, and every peer asked. Raises TimedOut, DaemonFailed."""
        client = self._client
        await client.refresh()
        await client.probe()
        now = time.monotonic()
        peers = []
        for record in client.records():
            link = client.link(record.peer_id)
            peers.append(
                PeerStatus(
                    record=record,
                    rtt_s=link.rtt_s if link else None,
                    decode_s=client.costs.block_s(record, 1),
                    prefill_s=client.costs.block_s(record, 64) / 64,
                    banned=client.health.banned(record.peer_id, now),
                )
            )
        coverage = client.view.coverage(client.dht_time())
        return SwarmStatus(peers=tuple(peers), coverage=tuple(coverage))

    # -- text ------------------------------------------------------------------------------------------------

    def session(
        self, *, wait_s: float | None = None, standby: str | None = None, objective: str | None = None
    ) -> TextSession:
        """A sequence that stays open: what it holds is not sent again. Use it inside `async with`. `wait_s`, `standby`
        and `objective` as in `connect`, for this session."""
        return TextSession(self, self._client.session(self._config_with(wait_s, standby, objective)))

    def _config_with(
        self, wait_s: float | None, standby: str | None, objective: str | None = None
    ) -> SessionConfig:
        config = self._session_config
        return replace(
            config,
            wait_s=config.wait_s if wait_s is None else wait_s,
            standby=config.standby if standby is None else standby,
            objective=config.objective if objective is None else Objective.parse(objective),
        )

    def resume(
        self, path: str | os.PathLike[str], *, wait_s: float | None = None, standby: str | None = None
    ) -> TextSession:
        """The session that `TextSession.save` left there, also of a process that crashed; that process's own is over
        (Superseded) once this one speaks. What its peers still hold is not computed again. If a generation was under
        way, `rest` continues it. Raises BadInput."""
        return self._resumed(saved.read(path), wait_s, standby)

    def _resumed(self, read: saved.SavedSession, wait_s: float | None, standby: str | None) -> TextSession:
        session = self._client.session(self._config_with(wait_s, standby), read)
        return TextSession(self, session, _unfinished(read))

    def chat(self, system: str | None = None) -> Chat:
        """A conversation that sends only what is new in each turn. Use it inside `async with`."""
        return Chat(self.session(), [{"role": "system", "content": system}] if system else [])

    def resume_chat(
        self, path: str | os.PathLike[str], *, wait_s: float | None = None, standby: str | None = None
    ) -> Chat:
        """The conversation that `Chat.save` left there; see `resume`. If an answer was under way, `Chat.rest` continues
        it. Raises BadInput, also for a session that is no chat."""
        read = saved.read(path)
        if read.messages is None:
            raise BadInput(f"{path} is a saved session, and no chat", advice="Take it up with resume.")
        return Chat(self._resumed(read, wait_s, standby), read.messages)

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **settings: Any
    ) -> AsyncGenerator[Token, None]:
        """New tokens for a prompt, as they come. `settings`: the fields of GenerationSettings (max_new_tokens,
        temperature, top_k, top_p, repetition_penalty, seed, stop, ...), meant as in `transformers`.

        Raises BadInput and PromptTooLong before anything is sent, then NoRoute, TimedOut, Overloaded.
        """
        async with self.session() as session, aclosing(
            session.generate(prompt, timeout_s=timeout_s, **settings)
        ) as tokens:
            async for token in tokens:
                yield token

    async def generate_batch(
        self, prompts: Sequence[Prompt], *, timeout_s: float | None = None, **settings: Any
    ) -> list[GenerationResult]:
        """Prompts of any lengths side by side, each in a session of its own; peers run them packed together."""
        if isinstance(prompts, str) or not prompts:
            raise BadInput("a batch is a list of prompts")

        async def one(prompt: Prompt) -> GenerationResult:
            return await GenerationResult.collect(self.generate(prompt, timeout_s=timeout_s, **settings))

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(prompt)) for prompt in prompts]
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None  # the first one ended the others
        return [task.result() for task in tasks]

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text as the tokenizer does it, chats by the model's template. Raises BadInput."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt).input_ids)
        if prompt and isinstance(prompt[0], Mapping):
            return chat_ids(self.tokenizer, prompt)  # type: ignore[arg-type]
        return [int(token) for token in prompt]  # type: ignore[arg-type, call-overload]


class TextSession:
    """One open sequence of text. Its peers keep what it holds until it is closed."""

    def __init__(self, model: SwarmModel, session: Session, unfinished: Unfinished | None = None):
        self.model, self._session = model, session
        self._unfinished = unfinished

    async def __aenter__(self) -> TextSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @property
    def token_ids(self) -> list[int]:
        """The tokens held."""
        return list(self._session.token_ids)

    @property
    def route(self) -> Route | None:
        return self._session.route

    @property
    def standbys(self) -> tuple[Hop, ...]:
        """Who stands by, each with the blocks of its hop; see `SwarmModel.connect`."""
        return self._session.standbys

    @property
    def standbys_ready(self) -> bool:
        """Whether the loss of any hop would be made up for at once."""
        return self._session.standbys_ready

    def explain(self) -> Explanation:
        """Why this route: what each of its hops costs now, what the runner-up would cost, and who was left out. As text
        by `str`, as tables by `swarm.render.explanation_tables`. Raises NoRoute."""
        return self._session.healing.explain()

    @property
    def traces(self) -> list[StepTrace]:
        """Where the time of each step went."""
        return self._session.traces

    @property
    def recoveries(self) -> list[Recovery]:
        """Each route that was taken, and why."""
        return self._session.recoveries

    @property
    def said(self) -> list[int]:
        """Tokens so far of a generation that is under way, broke off, or was under way when this session was saved."""
        return list(self._unfinished.said) if self._unfinished is not None else []

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write down what another process needs to continue this text (`SwarmModel.resume`): tokens, the generation
        under way with its sampler, and where the cache is. The file holds the text in the clear. Raises BadInput."""
        saved.write(path, self._to_save())

    def _to_save(self) -> saved.SavedSession:
        under_way = self._unfinished
        if under_way is None:
            return self._session.saved()
        generation = saved.SavedGeneration(
            held=under_way.held,
            prompt=under_way.new_ids,
            said=under_way.said,
            settings=asdict(under_way.settings),
            sampler=under_way.sampler_state(),
        )
        return self._session.saved(under_way.position, generation)

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        save_to: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> AsyncGenerator[Token, None]:
        """Append a prompt to what is held and continue from there; see `SwarmModel.generate`. `save_to`: `save` there
        before each token is given out, so that nothing that was seen is lost with this process."""
        ids = self.model.encode(prompt)
        wanted = GenerationSettings(**_known(settings))
        async with aclosing(self._generate(ids, wanted, timeout_s, self._saving(save_to))) as tokens:
            async for token in tokens:
                yield token

    async def rest(
        self, *, timeout_s: float | None = None, save_to: str | os.PathLike[str] | None = None
    ) -> AsyncGenerator[Token, None]:
        """What is still to come of a generation that broke off here, or was under way when this session was saved: the
        tokens after `said`, the same as they would have been. Nothing if there is none."""
        if self._unfinished is not None:
            async with aclosing(self._follow(self._unfinished, timeout_s, self._saving(save_to))) as tokens:
                async for token in tokens:
                    yield token

    def _saving(self, path: str | os.PathLike[str] | None) -> Hear:
        return _nothing if path is None else lambda _: self.save(path)

    async def _generate(
        self, ids: Sequence[int], settings: GenerationSettings, timeout_s: float | None, hear: Hear
    ) -> AsyncGenerator[Token, None]:
        settings = settings.with_model_defaults(self.model.generation_config)
        unfinished = Unfinished(self._session.position, list(ids), settings)
        async with aclosing(self._follow(unfinished, timeout_s, hear)) as tokens:
            async for token in tokens:
                yield token

    async def _follow(
        self, unfinished: Unfinished, timeout_s: float | None, hear: Hear
    ) -> AsyncGenerator[Token, None]:
        """`hear` is told each token before it is given out."""
        model = self.model
        stream = generate(
            self._session,
            model._client.scorer,
            model.tokenizer,
            unfinished.new_ids,
            unfinished.settings,
            clock=time.monotonic,
            max_context=model.max_context,
            unfinished=unfinished,
        )
        self._unfinished = unfinished
        async with aclosing(self._in_time(stream, timeout_s)) as tokens:
            async for token in tokens:
                if token.finish is not None:
                    self._unfinished = None
                hear(token)
                yield token

    @staticmethod
    async def _in_time(stream: AsyncGenerator[Token, None], timeout_s: float | None) -> AsyncGenerator[Token, None]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        async with aclosing(stream):
            while True:
                left = None if deadline is None else deadline - time.monotonic()
                try:
                    async with asyncio.timeout(left):
                        token = await anext(stream, None)
                except TimeoutError:
                    raise TimedOut(f"the text was not finished within {timeout_s:g} s") from None
                if token is None:
                    return
                yield token

    def rollback(self, position: int) -> None:
        """Forget the tokens from `position` on, and a generation that was under way."""
        self._unfinished = None
        if not 0 <= position <= self._session.position:
            raise BadInput(f"cannot go back to position {position}: {self._session.position} are held")
        self._session.rollback(position)

    async def exclude(self, peer_id: PeerId, *, from_position: int = 0) -> None:
        """This peer was found to compute wrongly: never use it again here, take back the tokens from
        `from_position` on, and let nothing of it survive in any cache."""
        self._session.rollback(min(from_position, self._session.position))
        await self._session.exclude(peer_id, keep_to=from_position)


class Chat:
    """A conversation. `messages` is what was said so far, as transformers' chat templates take it."""

    def __init__(self, session: TextSession, messages: Sequence[dict[str, str]]):
        self.session, self.messages = session, list(messages)

    async def __aenter__(self) -> Chat:
        await self.session.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.session.__aexit__(*exc)

    async def send(
        self,
        text: str,
        *,
        timeout_s: float | None = None,
        save_to: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> AsyncGenerator[Token, None]:
        """Say something, and get the answer token by token. An answer that is broken off stays as far as it came;
        a turn that failed before its first token is as if it had not been said. `save_to`: as in
        `TextSession.generate`."""
        wanted = GenerationSettings(**_known(settings))
        said = [*self.messages, {"role": "user", "content": text}]
        session = self.session
        turn = next_turn_ids(session.model.tokenizer, session.token_ids, said)
        session.rollback(turn.keep)
        stream = session._generate(turn.append, wanted, timeout_s, self._hearing(said, "", save_to))
        try:
            async with aclosing(stream) as tokens:
                async for token in tokens:
                    yield token
        finally:
            if session._unfinished is not None and not session._unfinished.said:
                session._unfinished = None

    async def rest(
        self, *, timeout_s: float | None = None, save_to: str | os.PathLike[str] | None = None
    ) -> AsyncGenerator[Token, None]:
        """What is still to come of an answer that broke off here, or was under way when this chat was saved; nothing
        if there is none."""
        unfinished = self.session._unfinished
        if unfinished is None or not unfinished.said or not self.messages or self.messages[-1]["role"] != "assistant":
            return
        *said, answer = self.messages
        stream = self.session._follow(unfinished, timeout_s, self._hearing(said, answer["content"], save_to))
        async with aclosing(stream) as tokens:
            async for token in tokens:
                yield token

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write down what another process needs to go on with this conversation (`SwarmModel.resume_chat`); see
        `TextSession.save`. Raises BadInput."""
        session, unfinished = self.session, self.session._unfinished
        # A turn without a token of an answer is in no message yet.
        waiting = unfinished is not None and not unfinished.said
        read = session._session.saved(unfinished.held) if unfinished and waiting else session._to_save()
        read.messages = self.messages
        saved.write(path, read)

    def _hearing(self, said: list[dict[str, str]], answer: str, save_to: str | os.PathLike[str] | None) -> Hear:
        def hear(token: Token) -> None:
            nonlocal answer
            answer += token.text
            self.messages = [*said, {"role": "assistant", "content": answer}]
            if save_to is not None:
                self.save(save_to)

        return hear


def _nothing(token: Token) -> None:
    pass


def _known(settings: dict[str, Any]) -> dict[str, Any]:
    unknown = settings.keys() - set(GenerationSettings.__dataclass_fields__)
    if unknown:
        known = ", ".join(GenerationSettings.__dataclass_fields__)
        raise BadInput(f"unknown setting {', '.join(sorted(unknown))}; known are {known}")
    return settings


def _unfinished(read: saved.SavedSession) -> Unfinished | None:
    """Raises BadInput if the file was tampered with."""
    generation = read.generation
    if generation is None:
        return None
    settings = GenerationSettings(**_known(generation.settings))
    unfinished = Unfinished(
        generation.held, generation.prompt, settings, said=generation.said, state=generation.sampler
    )
    if unfinished.position != len(read.tokens):
        raise BadInput("the saved session does not hold what its generation needs")
    return unfinished
