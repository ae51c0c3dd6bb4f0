"""How often, and after which pauses, anything here is tried again. Retry exists once, as this data.

Owns the numbers. Does not sleep, does not know the clock or what is retried, and draws no randomness of its
own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from routing.errors import BadInput

NEWCOMER_S = 1.5
"""A record can be read by all about a second after it was announced. Who finds nobody for some block looks again for so
long before it gives up, however little time it has: somebody may have come, and not be seen yet."""


class Rng(Protocol):
    """What is needed of a `random.Random`."""

    def random(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """At most `attempts` tries within the caller's `deadline_s`, pauses growing by `factor` up to `cap_s`.

    `jitter` is the share of a pause that is random, so that many clients do not return in step. Raises
    BadInput.
    """

    deadline_s: float
    attempts: int = 5
    base_s: float = 0.1
    factor: float = 2.0
    cap_s: float = 5.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.deadline_s < math.inf:
            raise BadInput(f"deadline_s must be above 0 and finite, not {self.deadline_s}")
        if self.attempts < 1:
            raise BadInput(f"attempts must be at least 1, not {self.attempts}")
        if not (0 <= self.base_s <= self.cap_s < math.inf and 1 <= self.factor < math.inf):
            raise BadInput("a retry policy needs 0 <= base_s <= cap_s and factor >= 1, all finite")
        if not 0 <= self.jitter <= 1:
            raise BadInput(f"jitter must be in [0, 1], not {self.jitter}")

    def delays(self, rng: Rng) -> Iterator[float]:
        """The pause before each attempt, in seconds: 0.0 for the first, then with backoff and jitter.

        Ends after `attempts`, or before a pause that alone would carry the sum of pauses past `deadline_s`.
        What the attempts themselves take is the caller's to measure: put the loop under
        `asyncio.timeout(deadline_s)`.
        """
        yield 0.0
        waited = 0.0
        pause = self.base_s
        for _ in range(self.attempts - 1):
            delay = pause * (1 - self.jitter * rng.random())
            waited += delay
            if waited >= self.deadline_s:
                return
            yield delay
            pause = min(pause * self.factor, self.cap_s)
