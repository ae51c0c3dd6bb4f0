"""Whom a client tries out, and how often."""

from __future__ import annotations

from routing.trials import ENOUGH, WITHIN_S, Trials
from routing.types import Hop, Route

HERE = Route((Hop("a", 0, 4), Hop("b", 4, 8)))
THERE = Route((Hop("c", 0, 3), Hop("b", 3, 6), Hop("d", 6, 8)))


def test_those_of_the_other_route_in_turn_each_often_enough_and_none_that_is_in_use() -> None:
    trials = Trials()
    tried = [trials.choose(HERE, THERE, float(turn)) for turn in range(2 * ENOUGH)]
    assert tried == [Hop("c", 0, 3), Hop("d", 6, 8)] * ENOUGH
    assert trials.choose(HERE, THERE, 2.0 * ENOUGH) is None, "all were tried enough"
    assert trials.choose(HERE, HERE, 2.0 * ENOUGH) is None


def test_what_was_tried_long_ago_is_tried_again_and_the_rest_forgotten() -> None:
    trials = Trials()
    for turn in range(2 * ENOUGH):
        trials.choose(HERE, THERE, float(turn))
    later = WITHIN_S + 1.5  # those of the first two turns are too old now
    assert trials.choose(HERE, THERE, later) == Hop("c", 0, 3)
    assert trials.choose(HERE, THERE, later) == Hop("d", 6, 8)
    assert trials.choose(HERE, THERE, later) is None
    assert trials.choose(HERE, HERE, 10 * WITHIN_S) is None and not trials._tried
