"""Retry as data: bounded in number and in time."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.errors import BadInput
from routing.retry import RetryPolicy


def test_pauses_grow_up_to_the_cap():
    policy = RetryPolicy(deadline_s=100.0, attempts=6, base_s=1.0, factor=2.0, cap_s=5.0, jitter=0.0)
    assert list(policy.delays(random.Random(0))) == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_pauses_end_before_the_deadline():
    policy = RetryPolicy(deadline_s=3.5, attempts=50, base_s=1.0, factor=2.0, cap_s=5.0, jitter=0.0)
    assert list(policy.delays(random.Random(0))) == [0.0, 1.0, 2.0]


def test_one_attempt_has_no_pause():
    assert list(RetryPolicy(deadline_s=1.0, attempts=1).delays(random.Random(0))) == [0.0]


def test_the_same_generator_gives_the_same_pauses_and_another_gives_others():
    policy = RetryPolicy(deadline_s=60.0)
    first = list(policy.delays(random.Random(1)))
    assert first == list(policy.delays(random.Random(1)))
    assert first != list(policy.delays(random.Random(2)))


@given(
    st.integers(1, 30),
    st.floats(0.01, 50.0),
    st.floats(0.0, 5.0),
    st.floats(1.0, 10.0),
    st.floats(0.0, 1.0),
    st.integers(0, 2**32),
)
def test_never_unbounded(attempts, deadline_s, base_s, factor, jitter, seed):
    policy = RetryPolicy(
        deadline_s=deadline_s, attempts=attempts, base_s=base_s, factor=factor, cap_s=5.0, jitter=jitter
    )
    delays = list(policy.delays(random.Random(seed)))
    assert 1 <= len(delays) <= attempts
    assert delays[0] == 0.0
    assert sum(delays) < deadline_s
    plain = base_s
    for delay in delays[1:]:
        assert plain * (1 - jitter) <= delay <= plain
        plain = min(plain * factor, 5.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"deadline_s": math.inf},
        {"deadline_s": math.nan},
        {"deadline_s": 0.0},
        {"attempts": 0},
        {"base_s": -1.0},
        {"base_s": 9.0, "cap_s": 1.0},
        {"factor": 0.5},
        {"cap_s": math.inf},
        {"jitter": 1.5},
    ],
)
def test_a_policy_without_an_end_is_refused(wrong):
    with pytest.raises(BadInput):
        RetryPolicy(**{"deadline_s": 1.0, **wrong})
