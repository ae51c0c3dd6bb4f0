"""Randomness as the simulator needs it, given by the caller: a stream for each thing that should not disturb others.

Owns the names of these needs alone; `random.Random` meets them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Chance(Protocol):
    """What is needed of a `random.Random`."""

    def random(self) -> float: ...

    def uniform(self, a: float, b: float) -> float: ...

    def gauss(self, mu: float, sigma: float) -> float: ...

    def expovariate(self, lambd: float) -> float: ...

    def lognormvariate(self, mu: float, sigma: float) -> float: ...

    def choice(self, seq: Sequence[T]) -> T: ...

    def sample(self, population: Sequence[T], k: int) -> list[T]: ...

    def randrange(self, start: int) -> int: ...


Streams = Callable[[str], Chance]
"""A new generator for each name, the same one for the same name and seed: with other clients, peers stay alike."""
