"""`SwarmModel` without `async`: the same methods, blocking. Works inside a running Jupyter loop, too.

    with SwarmModel.connect("smollm2", join=code) as model:
        for token in model.generate("The capital of France is", max_new_tokens=32):
            print(token.text, end="", flush=True)

One event loop on one background thread runs the asynchronous objects; nothing here decides anything.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar

from routing.errors import BadInput
from routing.explain import Explanation
from swarm import model as asynchronous
from swarm.generation import GenerationResult, Token
from swarm.model import Prompt, SwarmStatus

T = TypeVar("T")

STOPS_WITHIN_S = 5.0  # what was cancelled


def _settle(result: Future[T], task: asyncio.Task[T]) -> None:
    """What became of a task, for the thread that waits for it."""
    if task.cancelled():
        result.set_exception(CancelledError())
    elif error := task.exception():
        result.set_exception(error)
    else:
        result.set_result(task.result())


class _Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="swarm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it to its end. Ctrl-C, or a notebook's stop button, cancels it there and raises here, once it has
        ended there, too: what it used is free again then. Raises BadInput after `stop`."""
        if self._loop.is_closed():
            work.close()
            raise BadInput("the model is closed")
        result: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda task: _settle(result, task))

        def stop() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # the interrupt came before it was handed over
                work.close()
                result.set_exception(CancelledError())

        try:
            self._loop.call_soon_threadsafe(begin)
            return result.result()
        except BaseException:
            if not result.done():
                self._loop.call_soon_threadsafe(stop)
                wait([result], STOPS_WITHIN_S)
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        async def following() -> tuple[bool, Any]:
            try:
                return True, await anext(items)
            except StopAsyncIteration:
                return False, None

        try:
            while True:
                more, item = self.run(following())
                if not more:
                    return
                yield item
        finally:
            if not self._loop.is_closed():
                self.run(items.aclose())  # type: ignore[attr-defined]

    def stop(self) -> None:
        self.run(self._loop.shutdown_asyncgens())  # generators that nobody read to their end
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SwarmModel:
    """See `swarm.SwarmModel`. Make it with `connect`, and use it inside `with`."""

    def __init__(self, model: asynchronous.SwarmModel):
        self._model = model
        self._loop: _Loop

    @classmethod
    def connect(cls, model: str, *, join: str, **options: Any) -> SwarmModel:
        """See `swarm.SwarmModel.connect`."""
        return cls(asynchronous.SwarmModel.connect(model, join=join, **options))

    def __enter__(self) -> SwarmModel:
        self._loop = _Loop()
        try:
            self._loop.run(self._model.__aenter__())
        except BaseException:
            self._loop.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._loop.run(self._model.__aexit__())
        finally:
            self._loop.stop()

    @property
    def tokenizer(self) -> Any:
        return self._model.tokenizer

    @property
    def max_context(self) -> int:
        return self._model.max_context

    def encode(self, prompt: Prompt) -> list[int]:
        return self._model.encode(prompt)

    def status(self) -> SwarmStatus:
        return self._loop.run(self._model.status())

    def generate(self, prompt: Prompt, *, timeout_s: float | None = None, **settings: Any) -> Iterator[Token]:
        return self._loop.iterate(self._model.generate(prompt, timeout_s=timeout_s, **settings))

    def generate_batch(
        self, prompts: Sequence[Prompt], *, timeout_s: float | None = None, **settings: Any
    ) -> list[GenerationResult]:
        return self._loop.run(self._model.generate_batch(prompts, timeout_s=timeout_s, **settings))

    def session(
        self, *, wait_s: float | None = None, standby: str | None = None, objective: str | None = None
    ) -> TextSession:
        return TextSession(self._loop, self._model.session(wait_s=wait_s, standby=standby, objective=objective))

    def resume(
        self, path: str | os.PathLike[str], *, wait_s: float | None = None, standby: str | None = None
    ) -> TextSession:
        async def resumed() -> asynchronous.TextSession:
            return self._model.resume(path, wait_s=wait_s, standby=standby)

        return TextSession(self._loop, self._loop.run(resumed()))

    def chat(self, system: str | None = None) -> Chat:
        return Chat(self._loop, self._model.chat(system))

    def resume_chat(
        self, path: str | os.PathLike[str], *, wait_s: float | None = None, standby: str | None = None
    ) -> Chat:
        async def resumed() -> asynchronous.Chat:
            return self._model.resume_chat(path, wait_s=wait_s, standby=standby)

        return Chat(self._loop, self._loop.run(resumed()))


class TextSession:
    """See `swarm.model.TextSession`. Use it inside `with`."""

    def __init__(self, loop: _Loop, session: asynchronous.TextSession):
        self._loop, self._session = loop, session

    def __enter__(self) -> TextSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._session.__aexit__())

    def __getattr__(self, name: str) -> Any:
        if name in ("token_ids", "said", "route", "traces", "recoveries"):
            return getattr(self._session, name)
        raise AttributeError(name)

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        save_to: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> Iterator[Token]:
        return self._loop.iterate(self._session.generate(prompt, timeout_s=timeout_s, save_to=save_to, **settings))

    def rest(
        self, *, timeout_s: float | None = None, save_to: str | os.PathLike[str] | None = None
    ) -> Iterator[Token]:
        return self._loop.iterate(self._session.rest(timeout_s=timeout_s, save_to=save_to))

    def explain(self) -> Explanation:
        async def explain() -> Explanation:
            return self._session.explain()

        return self._loop.run(explain())

    def save(self, path: str | os.PathLike[str]) -> None:
        async def save() -> None:
            self._session.save(path)

        self._loop.run(save())

    def rollback(self, position: int) -> None:
        async def go_back() -> None:
            self._session.rollback(position)

        self._loop.run(go_back())


class Chat:
    """See `swarm.model.Chat`. Use it inside `with`."""

    def __init__(self, loop: _Loop, chat: asynchronous.Chat):
        self._loop, self._chat = loop, chat
        self.session = TextSession(loop, chat.session)

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._chat.__aexit__())

    @property
    def messages(self) -> list[dict[str, str]]:
        return self._chat.messages

    def send(
        self,
        text: str,
        *,
        timeout_s: float | None = None,
        save_to: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> Iterator[Token]:
        return self._loop.iterate(self._chat.send(text, timeout_s=timeout_s, save_to=save_to, **settings))

    def rest(
        self, *, timeout_s: float | None = None, save_to: str | os.PathLike[str] | None = None
    ) -> Iterator[Token]:
        return self._loop.iterate(self._chat.rest(timeout_s=timeout_s, save_to=save_to))

    def save(self, path: str | os.PathLike[str]) -> None:
        async def save() -> None:
            self._chat.save(path)

        self._loop.run(save())
