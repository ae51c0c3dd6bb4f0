"""The simulator: figures worked out by hand, the same report for the same seed, conservation, all kinds of faults."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import count

import pytest

from routing.coordinates import LEAST_HEIGHT_S
from routing.errors import BadInput
from routing.simulation import Fault, Report, Scenario, planning_growth, simulate
from routing.simulation.agenda import Agenda
from routing.simulation.chance import Chance
from routing.simulation.delays import HANDSHAKE
from routing.simulation.report import BUCKETS, Tally, jain, percentile
from swarm.simulation import load, names

BLOCKS, BLOCK_S, RTT_S = 24, 0.004, 0.05
ALIKE = Scenario(
    peers=1, spans=(f"0:{BLOCKS}",), n_blocks=BLOCKS, block_s=BLOCK_S, speed_spread=0.0, hop_s=0.0, noise=0.0,
    regions=1, region_rtt_s=0.0, access_s=0.0, clients=1, answers=1, start_within_s=0.0, prompt_tokens=10,
    prompt_spread=0.0, answer_tokens=100, answer_spread=0.0, row_bytes=0, seconds=60.0, standby="none",
)  # fmt: skip
BUSY = Scenario(
    peers=24, lifetime_s=60.0, clients=6, think_s=3.0, start_within_s=5.0, answer_tokens=50, prompt_tokens=40,
    seconds=120.0, load_s=5.0, speed_spread=0.3, look_s=4.0,
)  # fmt: skip


def run(scenario: Scenario, **options) -> Report:
    def streams(name: str) -> Chance:
        return random.Random(f"{scenario.seed}:{name}")

    return simulate(scenario, streams, **options)


# -- figures that can be worked out by hand ------------------------------------------------------------------------


def test_one_peer_and_one_client_are_as_fast_as_the_sum_says() -> None:
    # What is left of a way without length is the least height of two coordinates.
    report = run(replace(ALIKE, hop_s=RTT_S))
    assert report.finished == 1 and report.tokens == 100
    assert report.rates[1] == pytest.approx(1 / (2 * LEAST_HEIGHT_S + RTT_S + BLOCKS * BLOCK_S))


def test_the_first_token_takes_the_way_and_the_prompt() -> None:
    report = run(replace(ALIKE, access_s=RTT_S, access_spread=0.0))
    way_s = 1 / report.rates[1] - BLOCKS * BLOCK_S
    assert way_s >= RTT_S  # each end is half of it away from where their region is, and not at the same place
    assert report.first_token_s[0] == pytest.approx(way_s + BLOCKS * BLOCK_S)  # no pass takes less than a step does
    long = run(replace(ALIKE, access_s=RTT_S, access_spread=0.0, prompt_tokens=60))
    assert long.first_token_s[0] == pytest.approx(way_s + 60 * BLOCKS * BLOCK_S * ALIKE.prefill_share)


def test_who_shares_a_peer_is_slower_by_the_slope() -> None:
    # While two or three are in a pass the others wait for its end: (1 + 0.25) + (1 + 2 * 0.25) passes for all five.
    report = run(replace(ALIKE, clients=5, slope=0.25))
    assert report.rates[1] == pytest.approx(1 / (2.75 * BLOCKS * BLOCK_S), rel=2e-3)
    assert report.fairness_clients == pytest.approx(1.0, abs=1e-3)


def test_clients_at_work_are_what_littles_law_says() -> None:
    report = run(replace(ALIKE, clients=8, answers=0, think_s=20.0, slope=0.0, seconds=1000.0, look_s=60.0))
    answer_s = report.first_token_s[0] + 99 / report.rates[1]
    rounds = report.seconds * 8 / (answer_s + 20.0)
    assert report.finished == pytest.approx(rounds, rel=0.1)


def test_a_lost_hop_costs_notice_plan_dial_and_replay() -> None:
    scenario = replace(ALIKE, peers=2, faults=(Fault(at_s=5.0, kind="kill"),))
    report = run(scenario)
    assert (report.finished, report.failed, report.losses, report.stalls_by_cause) == (1, 0, 1, {"loss": 1})
    replayed = 10 + int(1 + (5.0 - report.first_token_s[0]) * report.rates[1])
    replay_s = replayed * BLOCKS * BLOCK_S * scenario.prefill_share
    assert report.stall_s[0] == pytest.approx(replay_s, rel=0.1)
    assert report.stall_s[0] < report.gap_s[0] < report.stall_s[0] + BLOCKS * BLOCK_S  # the step that was lost is in it
    warm = run(replace(scenario, standby="warm"))
    assert warm.losses == 1 and warm.stall_s[0] == pytest.approx(BLOCKS * BLOCK_S, rel=0.01)  # the step again


def test_peers_are_as_quick_and_as_far_as_the_scenario_says() -> None:
    far, near = (RTT_S, 0.0, 0.0), (0.0, 0.0, 0.0)
    unlike = replace(ALIKE, peers=2, spans=("0:12", "12:24"), speeds=(2.0, 0.5), places=(near, near, far))
    way_s = 3 * LEAST_HEIGHT_S + RTT_S  # to the first, which is here, to the other, and back
    report = run(unlike)
    assert report.rates[1] == pytest.approx(1 / (way_s + 12 * BLOCK_S / 2.0 + 12 * BLOCK_S / 0.5))
    assert report.gap_s[0] == pytest.approx(1 / report.rates[1])


def test_the_first_prompt_waits_for_its_hops_to_connect() -> None:
    near, far = (0.0, 0.0, 0.0), (1.0, 0.0, 0.0)
    apart = replace(ALIKE, peers=2, spans=("0:12", "12:24"), places=(near, near, far), seconds=400.0)
    report = run(apart)
    assert report.first_token_s[0] - 1 / report.rates[1] == pytest.approx(
        HANDSHAKE * 1.0 - 12 * BLOCK_S, rel=1e-3  # the first hop dials and computes at the same time
    )


def test_a_hop_that_becomes_slow_is_felt_from_then_on_and_not_before() -> None:
    report = run(replace(ALIKE, faults=(Fault(at_s=5.0, kind="slow", factor=10.0),)))
    assert report.gap_s[0] == pytest.approx(2 * LEAST_HEIGHT_S + 10 * BLOCKS * BLOCK_S, rel=0.01)


def test_a_prompt_beside_slows_decoding_and_decoding_slows_it() -> None:
    alone, two = run(ALIKE), run(replace(ALIKE, clients=2, start_within_s=2.0, prompt_tokens=60))
    lonely = run(replace(ALIKE, prompt_tokens=60))
    assert two.first_token_s[3] > 1.5 * lonely.first_token_s[0]
    assert two.gap_s[3] > 1.5 * alone.gap_s[0]


# -- what must hold always -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_lost_and_nobody_fails_without_need(seed: int) -> None:
    report = run(replace(BUSY, seed=seed))
    assert report.started == report.finished + report.failed + report.running and report.started > 50
    assert report.failed_while_covered == 0
    assert sum(report.tokens_over_time) * report.seconds / BUCKETS == pytest.approx(report.tokens, abs=1)
    assert report.died > 5 and report.left > 5 and report.joined > 10 and report.losses and report.handed_over
    assert 0 < report.fairness_clients <= 1 and report.least_coverage >= 0


def test_peers_move_to_where_others_were_lost_and_nobody_notices() -> None:
    crowd = replace(load("rebalance", ["clients=10", "slope=1", "look_s=10"]), seconds=300.0, standby="none")
    moving, staying = run(crowd), run(replace(crowd, rebalance_s=0.0))
    assert staying.rebalanced == 0 and 4 <= moving.rebalanced <= 8
    late = slice(BUCKETS * 3 // 4, BUCKETS)
    assert sum(moving.tokens_over_time[late]) > 1.3 * sum(staying.tokens_over_time[late])
    assert moving.failed == 0 and set(moving.stalls_by_cause) <= {"loss", "move"} and moving.handed_over


def test_a_block_whose_last_peers_leave_is_rescued_while_they_still_serve() -> None:
    leaving = tuple(Fault(at_s=30.0, kind="leave", peer=number) for number in (1, 4))
    scenario = replace(
        BUSY, peers=5, lifetime_s=0.0, spans=("0:12", "12:24", "0:12"), faults=leaving, load_s=10.0, rebalance_s=5.0,
        answer_tokens=200, wait_s=30.0,
    )  # fmt: skip
    rescued, left = run(scenario), run(replace(scenario, rebalance_s=0.0))
    assert rescued.rebalanced >= 1 and rescued.failed == 0 and rescued.losses == 0
    assert rescued.uncovered_s < 10.0 + 1.5 * 5.0 + 2.0
    assert left.failed > 0 and left.uncovered_s == pytest.approx(90)


def test_the_same_seed_gives_the_same_report_and_another_one_does_not() -> None:
    short = replace(BUSY, seconds=40.0)
    first = run(short)
    assert run(short) == first
    assert run(replace(short, seed=2)) != first


def test_the_report_does_not_depend_on_how_this_process_hashes() -> None:
    code = (
        "import random; from tests.routing.test_simulator import BUSY, run\n"
        "from dataclasses import replace; print(run(replace(BUSY, seconds=30.0)))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def test_a_block_that_nobody_serves_fails_answers_and_that_is_no_fault_of_ours() -> None:
    report = run(replace(ALIKE, answers=3, think_s=1.0, answer_tokens=200, faults=(Fault(at_s=5.0, kind="kill"),)))
    assert report.failed == 3 and report.failed_while_covered == 0
    assert report.least_coverage == 0 and report.uncovered_s == pytest.approx(55.0)
    waits = run(replace(ALIKE, answers=1, wait_s=300.0, recovery_s=10.0, faults=(Fault(at_s=5.0, kind="kill"),)))
    assert waits.failed == 0 and waits.running == 1


def test_dead_hosts_that_do_not_answer_cost_a_new_session_no_whole_dial() -> None:
    report = run(replace(BUSY, graceful=0.0, silent=1.0, probes=0, seconds=300.0, lifetime_s=90.0))
    assert report.died > 20 and report.failed == 0
    assert report.first_token_s[1] < 1.5 and report.first_token_s[-1] < BUSY.connect_s


def test_who_finds_nobody_looks_until_a_newcomer_could_be_seen() -> None:
    """In this one a session asks in the second before a newcomer's record can be read."""
    busy = load("small").but(
        seed=8, peers=14, lifetime_s=90.0, faults=(), seconds=900.0, clients=8, answer_tokens=100
    )
    report = run(busy)
    assert report.failed > 0 and report.failed_while_covered == 0


def test_a_hop_that_becomes_slow_is_left() -> None:
    report = run(load("slow"))
    assert report.faults == 1 and report.moves >= 1 and report.failed == 0
    before = sum(report.tokens_over_time[10:20]) / 10
    after = sum(report.tokens_over_time[35:]) / 25
    assert after > 0.75 * before  # two chains of three are left


@pytest.mark.parametrize("prompt", [40, 200], ids=["short prompts", "long prompts"])
def test_a_flash_crowd_spreads_over_equal_replicas(prompt: int) -> None:
    report = run(replace(load("flash"), prompt_tokens=prompt))
    assert report.finished == report.started == 16
    assert report.fairness_peers > 0.9 and report.fairness_clients > 0.95 and report.moves <= 4


def test_a_peer_that_leaves_in_good_order_stalls_nobody() -> None:
    report = run(replace(ALIKE, peers=2, faults=(Fault(at_s=5.0, kind="leave"),)))
    assert (report.left, report.handed_over, report.stalls, report.finished) == (1, 1, 0, 1)


def test_plans_are_counted_and_timed_by_the_clock_that_is_given() -> None:
    ticks = count()
    report = run(ALIKE, clock=lambda: next(ticks) / 1e3)
    assert report.planning.plans > 1 and report.planning.ms_p50 == pytest.approx(1.0)
    assert run(ALIKE).planning.ms_p50 is None


def test_planning_is_measured_as_the_swarm_grows() -> None:
    grown = planning_growth(BUSY, (60, 200), lambda name: random.Random(name))
    assert [each.peers for each in grown] == [60, 200]
    assert all(each.candidates <= each.peers and each.relaxations > 0 for each in grown)


# -- parts ---------------------------------------------------------------------------------------------------------


def test_the_agenda_keeps_order() -> None:
    agenda, seen = Agenda(), []
    for name, at in (("c", 2.0), ("a", 1.0), ("b", 1.0), ("never", 9.0)):
        agenda.at(at, seen.append, name)
    agenda.at(1.5, lambda: agenda.at(0.0, seen.append, "late"))
    assert agenda.run(5.0) == 5 and seen == ["a", "b", "late", "c"] and agenda.now == 5.0


def test_percentiles_and_fairness() -> None:
    assert percentile([], 50) == 0 and percentile([3, 1, 2], 50) == 2 and percentile(range(1, 101), 99) == 99
    assert jain([1, 1, 1]) == 1 and jain([1, 0, 0, 0]) == 0.25 and jain([]) == 1


def test_tokens_fall_into_the_time_in_which_they_came() -> None:
    tally = Tally(60.0)
    tally.produced(0.5, 2.5, 20.0)
    report = tally.report("x", 1, 1, [], [], ())
    assert report.tokens_over_time[:4] == pytest.approx((5.0, 10.0, 5.0, 0.0))


# -- scenarios -----------------------------------------------------------------------------------------------------


def test_every_scenario_that_comes_along_can_be_read() -> None:
    assert {"churn", "flash", "regions", "slow", "small"} <= set(names())
    assert all(load(name).about and load(name).name == name for name in names())


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"peers": 0}, "peers is a number from 1"),
        ({"peers": 2.5}, "peers is a whole number"),
        ({"peers": True}, "peers is a number"),
        ({"seconds": float("nan")}, "seconds is a number"),
        ({"speed": 1}, "a scenario has no speed"),
        ({"standby": "cold"}, "standby is one of none, inputs, warm"),
        ({"lifetime": "short"}, "lifetime is one of"),
        ({"coordinates": 1}, "coordinates is true or false"),
        ({"capacity": []}, "capacity is a list of numbers"),
        ({"capacity": 4}, "capacity is a list"),
        ({"spans": ["0:99"]}, "0:99"),
        ({"spans": [3]}, "spans is a list of spans"),
        ({"speeds": [1, 0]}, "each of speeds is a number"),
        ({"speeds": 2}, "speeds is a list"),
        ({"places": [[0, 0, 0]]}, "at least one peer's"),
        ({"places": [[0, 0, 0], [0.1, 0.2]]}, "3 axes"),
        ({"places": [[0, 0, 0], [0, 0, "far"]]}, "each axis of places is a number"),
        ({"places": [0.1, 0.2]}, "each of places is a list"),
        ({"name": 3}, "name is a text"),
        ({"faults": [{"kind": "slow"}]}, "at_s and kind"),
        ({"faults": [{"kind": "melt", "at_s": 1}]}, "slow, kill, leave"),
        ({"faults": [{"kind": "slow", "at_s": 1, "peer": "b"}]}, "busiest"),
        ({"faults": 3}, "faults is a list"),
    ],
)
def test_what_makes_no_sense_is_named(facts: dict, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Scenario.of(facts)


def test_numbers_may_be_written_without_a_point() -> None:
    scenario = Scenario.of({"seconds": 60, "capacity": [3], "faults": [{"at_s": 3, "kind": "kill", "peer": 0}]})
    assert scenario.seconds == 60.0 and scenario.capacity == (3,) and scenario.faults[0].peer == 0
