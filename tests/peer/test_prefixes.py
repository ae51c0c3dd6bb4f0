"""What closed sessions leave is found by names alone, by their own client alone, and given up when it is old."""

from __future__ import annotations

from typing import Any

import pytest

from peer import prefixes
from peer.prefixes import LEAST, Prefixes
from swarm.names import NameChain

KEY = (0, 3)


class Store:
    evicted = False

    def evict(self) -> None:
        self.evicted = True


def names(tokens: str, root: bytes = b"fp32", secret: bytes = b"secret") -> bytes:
    chain = NameChain(secret, root)
    chain.extend(list(tokens.encode()))
    return chain.slice(0, len(tokens))


LONG, OTHER = "a sentence of more than sixteen tokens", "quite another sentence, long enough too"


def kept(prefixes: Prefixes, tokens: str = LONG, client: str = "client", now: float = 0.0) -> Any:
    store: Any = Store()
    prefixes.keep(client, KEY, names(tokens), store, now)
    return store


def test_the_longest_common_prefix_is_found():
    left = Prefixes(600)
    kept(left, OTHER)
    store, shorter = kept(left, LONG + " and more"), kept(left, LONG[:20] + "?")
    donor = left.find("client", KEY, names(LONG + " or less"), 1.0)
    assert donor is not None and donor.store is store and donor.positions == len(LONG) + 1
    donor = left.find("client", KEY, names(LONG[:20] + "? No."), 1.0)
    assert donor is not None and donor.store is shorter and donor.positions == 21


@pytest.mark.parametrize(
    ("client", "key", "wanted"),
    [
        ("another", KEY, names(LONG)),
        ("client", (0, 2), names(LONG)),
        ("client", KEY, names(LONG, root=b"bf16")),
        ("client", KEY, names(LONG, secret=b"other")),
        ("client", KEY, names(LONG[: LEAST - 1])),
        ("client", KEY, names(OTHER)),
    ],
    ids=["client", "boundaries", "root", "secret", "too little", "content"],
)
def test_nothing_else_is_shared(client, key, wanted):
    left = Prefixes(600)
    kept(left)
    assert left.find(client, key, wanted, 1.0) is None


def test_what_is_too_little_is_given_up_at_once():
    left = Prefixes(600)
    assert kept(left, LONG[: LEAST - 1]).evicted and len(left) == 0


def test_a_longer_one_replaces_its_own_beginning():
    left = Prefixes(600)
    first, other = kept(left), kept(left, OTHER)
    second = kept(left, LONG + " and more")
    assert first.evicted and not other.evicted and not second.evicted and len(left) == 2


def test_what_is_taken_is_its_takers():
    left = Prefixes(600)
    store = kept(left)
    donor = left.find("client", KEY, names(LONG), 1.0)
    assert donor is not None and donor.kept is not None
    assert left.take(donor.kept) is store
    assert not store.evicted and len(left) == 0 and not left.drop_oldest()


def test_the_longest_unused_goes_first():
    left = Prefixes(600)
    first, second = kept(left, LONG, now=0.0), kept(left, OTHER, now=1.0)
    left.find("client", KEY, names(LONG), 2.0)
    assert left.drop_oldest()
    assert second.evicted and not first.evicted


def test_it_ends_with_time():
    left = Prefixes(600)
    first, second = kept(left, LONG, now=0.0), kept(left, OTHER, now=300.0)
    left.tick(599.0)
    assert not first.evicted
    left.tick(601.0)
    assert first.evicted and not second.evicted


def test_their_number_is_bounded(monkeypatch):
    monkeypatch.setattr(prefixes, "MOST", 5)
    left = Prefixes(600)
    stores = [kept(left, f"{index:016d} and so on") for index in range(8)]
    assert [store.evicted for store in stores] == [True] * 3 + [False] * 5
