"""Who may take part at all, and how those who may not are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from routing.constraints import Constraints
from routing.errors import BadInput, NoRoute
from routing.explain import explain
from routing.planner import plan
from routing.request import Request
from routing.types import Hop, PeerRecord, Span
from routing.view import View
from tests.routing.crowd import crowd

BLOCKS = 12
REQUEST = Request(n_blocks=BLOCKS)


def peer(peer_id: str = "a", **fields) -> PeerRecord:
    return PeerRecord(peer_id=peer_id, span=Span(0, BLOCKS), **fields)


@pytest.mark.parametrize(
    ("asked", "record", "name"),
    [
        ({"never": "a"}, peer(), "never"),
        ({"only": "b"}, peer(), "only"),
        ({"only": "ab"}, peer(), ""),
        ({"region": "EU"}, peer(region="eu"), ""),
        ({"region": ["eu", "us"]}, peer(region="us"), ""),
        ({"region": "eu"}, peer(region="us"), "region"),
        ({"region": "eu"}, peer(), "region"),
        ({"exact": "float32"}, peer(dtype="float32"), ""),
        ({"exact": "float32"}, peer(dtype="bfloat16"), "exact"),
        ({"exact": "float32"}, peer(), "exact"),
        ({"trusted": "b"}, peer(), ""),
    ],
)
def test_the_constraint_that_leaves_a_peer_out(asked: dict, record: PeerRecord, name: str) -> None:
    limits = Constraints.of(**asked)
    assert limits.forbids(record) == limits.forbids_block(record, 5, BLOCKS) == name
    assert limits.allow_hop(record, Hop("a", 3, 9), BLOCKS) == (not name)


def test_trusted_peers_alone_have_the_ends() -> None:
    limits = Constraints.of(trusted="b")
    assert [limits.forbids_block(peer(), block, BLOCKS) for block in (0, 1, 11)] == ["trusted", "", "trusted"]
    assert not limits.allow_hop(peer(), Hop("a", 6, 12), BLOCKS)
    assert limits.allow_hop(peer("b"), Hop("b", 0, 12), BLOCKS)


def test_what_makes_no_sense_is_refused() -> None:
    for wrong in ({"only": ()}, {"trusted": "a", "never": "a"}, {"region": ()}):
        with pytest.raises(BadInput, match="leaves no peer"):
            Constraints.of(**wrong)
    for region in ("", "Neverland!", "a-region-of-seventeen"):
        with pytest.raises(BadInput, match="is not a region"):
            Constraints.of(region=region)


def test_no_route_names_the_constraints_in_the_way() -> None:
    view, costs = crowd(10, BLOCKS, 1)
    nobody = replace(REQUEST, constraints=Constraints.of(only="x"))
    with pytest.raises(NoRoute, match=r"no peer that this session allows serves 0:12 of .* by only \(10 peers\)"):
        plan(view, costs, nobody, 0.0)
    two = View({"a": peer(expires_at=9, region="eu"), "b": peer("b", expires_at=9)}, BLOCKS)
    with pytest.raises(NoRoute, match=r"0:1, 11:12 of 12 blocks; left out by region \(1 peer\), trusted \(1 peer\)"):
        plan(two, costs, replace(REQUEST, constraints=Constraints.of(region="eu", trusted="x")), 0.0)
    with pytest.raises(NoRoute, match=r"^nobody serves"):
        plan(View({}, BLOCKS), costs, nobody, 0.0)


def test_an_explanation_counts_those_left_out() -> None:
    view, costs = crowd(40, BLOCKS, 2)
    far = sorted(view.records)[:5]
    records = {name: replace(each, region="us" if name in far else "eu") for name, each in view.records.items()}
    limited = replace(REQUEST, constraints=Constraints.of(region="eu", never=[far[0]]))
    found = explain(View(records, BLOCKS), costs, limited, 0.0)
    assert found.forbidden == {"never": (far[0],), "region": tuple(far[1:])}
    few = ", ".join(name[-6:] for name in far[1:4])
    assert f"left out by region: 4 peers ({few}, ...)" in str(found)
    short = View({name: records[name] for name in records if name not in far}, BLOCKS)
    assert explain(short, costs, limited, 0.0, swarm=View(records, BLOCKS)).forbidden == found.forbidden
