"""The blocking façade's loop: what it hands over, and that an interrupt at any moment leaves it usable."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from swarm.sync import _Loop


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Also where the tests run in the background of a shell, which ignores Ctrl-C for them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def loop() -> Iterator[_Loop]:
    loop = _Loop()
    yield loop
    loop.stop()


class Numbers:
    def __init__(self) -> None:
        self.begun = self.closed = 0

    async def count(self, pause_s: float) -> AsyncIterator[int]:
        self.begun, number = self.begun + 1, 0
        try:
            while True:
                await asyncio.sleep(pause_s)
                yield number
                number += 1
        finally:
            await asyncio.sleep(0.001)  # cleaning up takes its time
            self.closed += 1


def test_results_and_errors_come_across(loop):
    async def add(left: int, right: int) -> int:
        await asyncio.sleep(0)
        return left + right

    async def fail() -> None:
        raise ValueError("as expected")

    assert loop.run(add(2, 3)) == 5
    with pytest.raises(ValueError, match="as expected"):
        loop.run(fail())


def test_whoever_stops_early_closes_the_generator(loop):
    numbers = Numbers()
    for number in loop.iterate(numbers.count(0)):
        if number == 3:
            break
    assert numbers.closed == 1


@pytest.mark.parametrize("pause_s", [0.0, 0.002, 0.2])
def test_an_interrupt_at_any_moment_closes_the_generator(loop, pause_s):
    """Ctrl-C often comes while the work is just being handed over, half of its time a thread waits there."""
    numbers = Numbers()
    main = threading.get_ident()

    def interrupt(after_s: float) -> None:
        time.sleep(after_s)
        signal.pthread_kill(main, signal.SIGINT)

    for turn in range(40):
        thread = threading.Thread(target=interrupt, args=(0.001 + turn * 0.0003,))
        stream: Any = loop.iterate(numbers.count(pause_s))
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            for _ in stream:
                pass
        stream.close()
        thread.join()
        assert numbers.closed == numbers.begun  # on a busy machine the interrupt may come before it has begun
    assert numbers.begun > 20


def test_an_interrupt_stops_what_takes_long(loop):
    stopped = threading.Event()

    async def long() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            stopped.set()

    timer = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(long())
    assert stopped.is_set()
    timer.join()
