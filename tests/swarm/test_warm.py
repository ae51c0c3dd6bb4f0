"""A client's guess at what its peers hold is for the same hops and the same tokens."""

from __future__ import annotations

from routing.types import Hop, Route
from swarm.names import NameChain
from swarm.warm import MOST, WarmPrefixes


def route(*hops: str) -> Route:
    return Route(tuple(Hop(peer, 3 * index, 3 * index + 3) for index, peer in enumerate(hops)))


def names(tokens: str, root: bytes = b"") -> bytes:
    chain = NameChain(b"secret", root)
    chain.extend(list(tokens.encode()))
    return chain.slice(0, len(tokens))


def test_what_was_left_at_the_same_hops_is_remembered():
    warm = WarmPrefixes()
    warm.remember(names("one system prompt, first question"), route("a", "b"))
    warm.remember(names("one system"), route("c", "b"))
    wanted = names("one system prompt, second question")
    assert warm.positions(wanted, route("a", "b")) == len("one system prompt, ")
    assert warm.positions(wanted, route("c", "b")) == len("one system")
    assert warm.positions(wanted, route("a", "c")) == 0, "not all of its hops"
    assert warm.positions(names("one system prompt", b"another scope"), route("a", "b")) == 0
    assert warm.positions(names("Two"), route("a", "b")) == 0


def test_open_sessions_count_too():
    wanted, same = names("the best of three"), route("a", "b")
    assert WarmPrefixes().positions(wanted, same, [(names("the best"), same)]) == len("the best")


def test_what_is_remembered_is_bounded():
    warm = WarmPrefixes()
    warm.remember(names("first"), route("a"))
    for index in range(MOST):
        warm.remember(names(f"{index} more"), route("a"))
    assert warm.positions(names("first"), route("a")) == 0
