"""The control plane with real p2pd processes on loopback. Nodes are shared where a test leaves them whole."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop
from hivemind.dht.routing import DHTID
from hivemind.hivemind_cli import __path__ as hivemind_cli
from hivemind.p2p import P2P, PeerID
from hivemind.utils import MSGPackSerializer

from routing.errors import (
    BadInput,
    ClockSkew,
    DaemonFailed,
    PortInUse,
    ProtocolError,
    TimedOut,
    Unreachable,
)
from routing.retry import RetryPolicy
from routing.types import PeerRecord, PeerState, Span
from swarm.changes import serve_changes
from swarm.discovery import Directory
from swarm.hive import Hive, Upkeep
from swarm.identity import Identity
from swarm.records import RecordPolicy, block_key, encode_record

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.processes]

SWARM = bytes(range(32))
BLOCKS = 30
KEY = block_key(SWARM, 0)
QUICK = Upkeep(join_timeout_s=5.0, look_every_s=0.1)
P2PD = Path(hivemind_cli[0], "p2pd")


async def start(bootstrap: list[str] | tuple[str, ...] = (), **options) -> Hive:
    options = {
        "identity": Identity.generate(),
        "record_policy": RecordPolicy(SWARM),
        "upkeep": QUICK,
    } | options
    return await Hive.start(bootstrap=bootstrap, **options)


def directory(hive: Hive) -> Directory:
    return Directory(hive, hive.daemon.recipe.identity, hive.record_policy.swarm_id, BLOCKS)


def record(hive: Hive, **changes) -> PeerRecord:
    plain = PeerRecord(peer_id=hive.peer_id, span=Span(0, BLOCKS), addresses=("127.0.0.1:4001",))
    return replace(plain, **changes)


def alive(pid: int) -> bool:
    """Whether the process runs: one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def stopped(pid: int) -> bool:
    return all(
        stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    )


def command_line(pid: int | None) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


async def until(condition, timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - it comes true in other tasks and processes
            await asyncio.sleep(0.01)


def script(folder: Path, text: str) -> str:
    path = folder / "p2pd-wrapper"
    path.write_text("#!/bin/sh\n" + textwrap.dedent(text).replace("P2PD", str(P2PD)))
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def slow_start(tmp_path_factory):
    """What the test of a slow p2pd needs; its 20 s pass while the other tests run."""
    return script(tmp_path_factory.mktemp("slow"), 'sleep 20\nexec P2PD "$@"\n')


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def slow(slow_start) -> AsyncIterator[asyncio.Task[tuple[Hive, float]]]:
    async def timed() -> tuple[Hive, float]:
        began = time.monotonic()
        hive = await start(program=slow_start)
        return hive, time.monotonic() - began

    task = asyncio.create_task(timed())
    yield task
    hive, _ = await task
    await hive.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def founder() -> AsyncIterator[Hive]:
    async with await start() as hive:
        yield hive


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def member(founder) -> AsyncIterator[Hive]:
    async with await start(await founder.addresses()) as hive:
        yield hive


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(founder) -> AsyncIterator[Hive]:
    async with await start(await founder.addresses(), client=True) as hive:
        yield hive


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hostile(founder) -> AsyncIterator[Hive]:
    """A node that stores whatever it likes, and hands it on."""

    class Anything(RecordPolicy):
        def check(self, key, subkey, data, now, expires_at=None):
            return PeerRecord(peer_id=subkey or "", span=Span(0, 1))

    async with await start(await founder.addresses(), record_policy=Anything(SWARM)) as hive:
        yield hive


# Records


async def test_a_record_is_found_by_all_and_leaving_replaces_it(founder, member, client):
    peer = directory(member)
    stored = await peer.announce(record(member))
    for reader in (founder, member, client):
        assert await directory(reader).refresh() == [stored]
    await peer.leave()
    for reader in (founder, client):
        [left] = await directory(reader).refresh()
        assert (left.state, left.sequence > stored.sequence) == (PeerState.LEAVING, True)


async def test_a_client_stores_nothing_for_others(founder, member, client):
    await directory(member).announce(record(member))
    await directory(client).refresh()
    assert len(client._dht.node.protocol.storage) == 0
    assert PeerID.from_base58(client.peer_id) not in founder._dht.node.protocol.routing_table
    assert PeerID.from_base58(member.peer_id) in founder._dht.node.protocol.routing_table


async def test_a_client_is_told_by_the_nodes_that_store_without_a_read_of_the_dht(
    founder, member, client, monkeypatch
):
    for node in (founder, member):
        await serve_changes(node)
    peer, reader = directory(member), directory(client)
    stored = await peer.announce(record(member))
    monkeypatch.setattr(client, "fetch", None)
    assert await reader.refresh() == [stored]
    assert reader._sources.questions().keys() <= {founder.peer_id, member.peer_id}
    renewed = await peer.announce(stored)
    assert await reader.refresh() == [renewed] and renewed.sequence > stored.sequence


async def ask_to_store(by: Hive, at: Hive, value: object, expires_at: float, subkey, key: str = KEY) -> bool:
    """What a node answers that another one asks, past all checks of the asker, to store something."""
    [ok] = await by._dht.node.protocol.call_store(
        PeerID.from_base58(at.peer_id),
        [DHTID.generate(source=key)],
        [MSGPackSerializer.dumps(value)],
        [expires_at],
        [subkey],
    )
    return ok


async def test_storing_nodes_refuse_what_the_policy_refuses(founder, member, hostile):
    victim, now = member.daemon.recipe.identity, founder.dht_time()

    def signed(identity: Identity = victim, key: str = KEY, **changes) -> bytes:
        made = record(member, peer_id=identity.peer_id, **{"sequence": 10**15, "expires_at": now + 80} | changes)
        return encode_record(made, identity=identity, swarm_id=SWARM, key=key)

    async def stored(value: object, expires_at: float = now + 80, subkey=victim.peer_id, key=KEY) -> bool:
        return await ask_to_store(hostile, founder, value, expires_at, subkey, key)

    assert await stored(signed())
    thief = hostile.daemon.recipe.identity
    assert not await stored(signed(thief, sequence=10**15 + 1, expires_at=now + 90), now + 90)  # not the signer
    assert not await stored(signed()[:-1] + b"x", now + 80)
    assert not await stored(signed(sequence=10**15 + 1, expires_at=now + 400), now + 400)  # too far ahead
    assert not await stored(signed(sequence=10**15 + 1), now + 200)  # an expiry that nobody signed
    assert not await stored(signed(sequence=10**15 - 1, expires_at=now + 200), now + 200)  # an older record
    assert not await stored(signed(key="elsewhere"), key="elsewhere")
    assert not await stored(b"plain", now + 200, subkey=None)  # would erase the whole dictionary
    found = await founder.fetch([KEY], 5.0)
    assert found[KEY][victim.peer_id] == signed()
    assert await stored(signed(sequence=10**15 + 1, expires_at=now + 81), now + 81)  # the owner may renew


async def test_one_bad_entry_hides_no_other(founder, hostile):
    """A node that holds a forged entry beside true ones: hivemind alone would drop all that it answers."""
    honest = Identity.generate()
    key = block_key(SWARM, BLOCKS)  # which no other test uses
    made = replace(
        record(hostile, peer_id=honest.peer_id, span=Span(BLOCKS, BLOCKS + 1)),
        sequence=1,
        expires_at=founder.dht_time() + 60,
    )
    true = encode_record(made, identity=honest, swarm_id=SWARM, key=key)
    storage = hostile._dht.node.protocol.storage
    for subkey, value in ((honest.peer_id, true), (Identity.generate().peer_id, true), ("x", b"garbage")):
        storage.store_subkey(DHTID.generate(source=key), subkey, MSGPackSerializer.dumps(value), made.expires_at)
    assert len((await hostile.fetch([key], 5.0))[key]) == 3
    assert (await founder.fetch([key], 5.0))[key] == {honest.peer_id: true}


async def test_entries_of_one_key_that_lie_on_several_nodes_are_all_found(founder, member, client):
    key, peers = block_key(SWARM, BLOCKS + 1), []
    for holder in (founder, member):
        identity = Identity.generate()
        made = replace(
            record(founder, peer_id=identity.peer_id, span=Span(0, BLOCKS + 2)),
            sequence=1,
            expires_at=founder.dht_time() + 60,
        )
        value = MSGPackSerializer.dumps(encode_record(made, identity=identity, swarm_id=SWARM, key=key))
        storage = holder._dht.node.protocol.storage
        storage.store_subkey(DHTID.generate(source=key), identity.peer_id, value, made.expires_at)
        peers.append(identity.peer_id)
    assert set((await client.fetch([key], 5.0))[key]) == set(peers)


async def test_nothing_to_store_and_keys_that_nobody_has(founder):
    assert await founder.store([], 1.0) == 0
    assert await founder.fetch(["nothing", "here"], 5.0) == {"nothing": {}, "here": {}}


# Streams


async def test_a_stream_tells_who_opened_it(founder, member, client):
    async def echo(peer_id, reader, writer):
        writer.write(peer_id.encode() + await reader.readexactly(5))
        await writer.drain()

    await member.serve("echo", echo)
    # The two only know each other through the founder.
    reader, writer = await client.open(member.peer_id, "echo", 5.0)
    writer.write(b"hello")
    assert (await reader.read()).decode() == client.peer_id + "hello"
    writer.close()


async def test_streams_that_nobody_answers(founder, member):
    with pytest.raises(Unreachable, match="protocols not supported"):
        await member.open(founder.peer_id, "no-such-protocol", 5.0)
    with pytest.raises(Unreachable, match="not found"):
        await member.open(Identity.generate().peer_id, "echo", 5.0)
    with pytest.raises(BadInput, match="not a peer id"):
        await member.open("0O0O", "echo", 5.0)


async def test_a_blob_comes_whole_or_not_at_all(founder, client):
    blob = os.urandom(3_000_000)

    async def stall(peer_id, reader, writer):
        writer.write((1000).to_bytes(8, "little") + b"x")
        await writer.drain()
        await reader.read()

    async def cut(peer_id, reader, writer):
        writer.write((1000).to_bytes(8, "little") + b"x")

    tries = []

    async def unsteady(peer_id, reader, writer):
        writer.write((4).to_bytes(8, "little") + (b"blob" if tries else b"x"))
        tries.append(peer_id)

    await founder.serve_blob("manifest", lambda: blob)
    await founder.serve("swarm.blob.1/unsteady", unsteady)
    assert await client.fetch_blob(founder.peer_id, "unsteady", 5.0, 1000) == b"blob" and len(tries) == 2
    await founder.serve("swarm.blob.1/stall", stall)
    await founder.serve("swarm.blob.1/cut", cut)
    assert await client.fetch_blob(founder.peer_id, "manifest", 5.0, len(blob)) == blob
    with pytest.raises(ProtocolError, match="3000000 bytes"):
        await client.fetch_blob(founder.peer_id, "manifest", 5.0, len(blob) - 1)
    with pytest.raises(TimedOut, match="not complete"):
        await client.fetch_blob(founder.peer_id, "stall", 0.2, 1000)
    with pytest.raises(Unreachable, match="broke off"):
        await client.fetch_blob(founder.peer_id, "cut", 5.0, 1000)
    with pytest.raises(Unreachable, match="not supported"):
        await client.fetch_blob(founder.peer_id, "nothing", 5.0, 1000)


# The way in


async def test_nothing_is_dialled_that_we_do_not_dial(founder, member):
    for hive in (founder, member):
        flags = command_line(hive.daemon.pid)
        assert {"-autonat=0", "-natPortMap=0", "-autoRelay=0", "-b=0"} <= set(flags)
        assert {"-relayService=0", "-relayDiscovery=0"} <= set(flags)
        assert not [flag for flag in flags if flag.startswith(("-bootstrapPeers", "-trustedRelays"))]


async def test_ipv6_alone():
    async with await start(host="::1") as first:
        [address] = await first.addresses()
        assert address.startswith("/ip6/::1/tcp/")
        async with await start([address], host="::1") as second:
            await directory(first).announce(record(first))
            assert [peer.peer_id for peer in await directory(second).refresh()] == [first.peer_id]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_addresses_that_do_not_answer_are_named_within_the_deadline(founder):
    ghost = Identity.generate().peer_id
    refused = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{ghost}"
    [real] = await founder.addresses()
    stranger = real.rpartition("/p2p/")[0] + f"/p2p/{Identity.generate().peer_id}"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        mute = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{Identity.generate().peer_id}"
        began = time.monotonic()
        with pytest.raises(Unreachable) as error:
            await start([refused, stranger, mute], upkeep=replace(QUICK, join_timeout_s=1.5))
        assert time.monotonic() - began < 8
    for address in (refused, stranger, mute):
        assert address in str(error.value)
    assert "connection refused" in str(error.value) and "peer id mismatch" in str(error.value)
    async with await start([refused, real]) as hive:  # one that answers is enough
        assert await directory(hive).refresh() is not None


async def test_ones_own_address_is_not_asked_the_way():
    port, identity = free_port(), Identity.generate()
    own = f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"
    async with await start([own], identity=identity, port=port) as hive:
        assert await hive.addresses() == [own]


async def test_announced_addresses_are_told_instead():
    async with await start(announce=["/ip4/203.0.113.5/tcp/4001"]) as hive:
        assert await hive.addresses() == [f"/ip4/203.0.113.5/tcp/4001/p2p/{hive.peer_id}"]


async def test_a_taken_port_is_refused_before_p2pd_would_share_it(founder):
    [address] = await founder.addresses()
    with pytest.raises(PortInUse, match="taken"):
        await start(port=int(address.split("/")[4]))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bootstrap": ["127.0.0.1:4001"]}, "not a multiaddr"),
        ({"bootstrap": ["/ip4/1.2.3/tcp/1/p2p/" + Identity.generate().peer_id]}, "not a multiaddr"),
        ({"bootstrap": ["/ip4/127.0.0.1/tcp/1/p2p/0O"]}, "not a multiaddr"),
        ({"host": "localhost"}, "not an IP address"),
        ({"host": "203.0.113.5"}, "cannot listen"),
    ],
)
async def test_arguments_that_make_no_sense(options, reason):
    with pytest.raises(BadInput, match=reason):
        await start(**options)


def skew_named(refused: pytest.ExceptionInfo[ClockSkew]) -> float:
    """Seconds in the message; half of an answer's round trip is not known, so they are not exact."""
    found = re.search(r"(\d+\.\d) s", str(refused.value))
    assert found, refused.value
    return float(found[1])


@pytest.mark.parametrize(("off", "word"), [(10.0, "ahead of"), (-10.0, "behind")])
async def test_a_wrong_clock_is_named_with_its_skew(founder, off, word):
    with pytest.raises(ClockSkew, match=word) as refused:
        await start(await founder.addresses(), clock=lambda: time.time() + off)
    assert skew_named(refused) == pytest.approx(10.0, abs=1.0)
    async with await start(await founder.addresses(), clock=lambda: time.time() + off / 5):
        pass  # 2 s are allowed


# The life of p2pd


async def test_calls_fail_at_once_when_p2pd_dies_and_all_is_back_after_its_restart(founder):
    """Kill a node's p2pd under a pending call, twice: same identity and port, handlers, records, callback."""
    async with await start() as first, await start(await first.addresses()) as second:
        await first.serve_blob("name", lambda: b"blob")
        other = await directory(second).announce(record(second))
        addresses = await first.addresses()
        announcer, restarts = directory(first), []

        async def announce_again() -> None:
            restarts.append(await announcer.announce(record(first)))

        first.daemon.on_restart.append(announce_again)
        await until(lambda: second.peer_id in first.daemon._known and first.peer_id in second.daemon._known)
        for deaths in (1, 2):
            pid = first.daemon.pid
            os.kill(pid, signal.SIGSTOP)
            await until(lambda pid=pid: stopped(pid))
            pending = [
                asyncio.create_task(call)
                for call in (
                    first.addresses(60.0),
                    first.fetch([KEY], 60.0),
                    first.open(second.peer_id, "x", 60.0),
                )
            ]
            await until(lambda: len(first.daemon._life._deadlines) == 3)
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            told, read, opened = await asyncio.gather(*pending, return_exceptions=True)
            for outcome in (told, opened) if isinstance(read, dict) else (told, read, opened):
                # What this node stores itself may be read to the end without p2pd.
                assert isinstance(outcome, DaemonFailed), outcome
                assert re.search(r"p2pd (has ended|does not answer)", str(outcome))
            assert time.monotonic() - began < 2
            assert await first.addresses(30.0) == addresses  # waits for the restart
            assert first.daemon.pid != pid
            await until(lambda deaths=deaths: len(restarts) == deaths)
            assert first.daemon.restarts == deaths
            assert await second.fetch_blob(first.peer_id, "name", 10.0, 100) == b"blob"
            assert await announcer.refresh() == sorted([restarts[-1], other], key=lambda seen: seen.peer_id)
            assert restarts[-1] in await directory(second).refresh()


async def test_one_p2pd_is_a_node_of_two_swarms_which_do_not_meet():
    """Also after a restart; and who is in one of them alone is no way into the other."""
    elsewhere = bytes(range(1, 33))
    async with await start() as first, await start(await first.addresses()) as beside_first:
        second = await Hive.join(first.daemon, record_policy=RecordPolicy(elsewhere))
        addresses = await beside_first.addresses()
        with pytest.raises(Unreachable):
            await start(addresses, record_policy=RecordPolicy(elsewhere))
        for hive, blob in ((first, b"first"), (second, b"second")):
            await hive.serve_blob("name", lambda blob=blob: blob)
        async with await start(await first.addresses(), record_policy=RecordPolicy(elsewhere)) as beside_second:
            pairs = [(first, beside_first, b"first"), (second, beside_second, b"second")]
            for deaths in (0, 1):
                await until(lambda deaths=deaths: first.daemon.restarts == deaths)
                for hive, beside, blob in pairs:
                    stored = [await directory(each).announce(record(each)) for each in (hive, beside)]
                    for reader in (hive, beside):
                        assert await directory(reader).refresh() == sorted(stored, key=lambda seen: seen.peer_id)
                    assert await beside.fetch_blob(first.peer_id, "name", 10.0, 100) == blob
                if not deaths:
                    node = second._dht.node
                    os.kill(first.daemon.pid, signal.SIGKILL)
        assert not node.is_alive and second._dht.node.is_alive
        await second.close()
        assert not second._dht.node.is_alive and first._dht.node.is_alive


async def test_a_node_left_alone_finds_the_swarm_again():
    """The founder's whole process is gone and back, and knows nobody: the other one comes to it."""
    identity = Identity.generate()
    async with await start(identity=identity) as first:
        addresses = await first.addresses()
        second = await start(addresses)
        await until(lambda: first.peer_id in second.daemon._known)
    async with second:
        with pytest.raises(Unreachable):
            await second.open(first.peer_id, "x", 5.0)
        await directory(second).announce(record(second))  # so that it finds out
        async with await start(identity=identity, port=int(addresses[0].split("/")[4])) as first:
            table = first._dht.node.protocol.routing_table
            await until(lambda: PeerID.from_base58(second.peer_id) in table)
            assert [peer.peer_id for peer in await directory(first).refresh()] == [second.peer_id]


async def test_restarts_are_bounded(tmp_path):
    count = tmp_path / "count"
    wrapper = script(
        tmp_path,
        f"""\
        echo x >> {count}
        [ $(wc -l < {count}) -gt 1 ] && echo "no more" && exit 1
        exec P2PD "$@"
        """,
    )
    restart = RetryPolicy(deadline_s=10.0, attempts=3, base_s=0.01)
    async with await start(program=wrapper, upkeep=replace(QUICK, restart=restart)) as hive:
        os.kill(hive.daemon.pid, signal.SIGKILL)
        await hive.daemon._life.lost.wait()
        with pytest.raises(DaemonFailed, match=r"could not be started again.*no more"):
            await hive.addresses(60.0)
        assert count.read_text() == "x\n" * 4  # the first start, and three attempts
    with pytest.raises(DaemonFailed):
        await hive.addresses()


async def test_a_p2pd_that_cannot_start(tmp_path):
    with pytest.raises(DaemonFailed, match="not found"):
        await start(program=str(tmp_path / "nothing"))
    with pytest.raises(DaemonFailed, match="out of order"):
        await start(program=script(tmp_path, "echo out of order; exit 1\n"))


async def test_a_p2pd_that_says_nothing_is_ended_at_the_deadline(tmp_path):
    pid = tmp_path / "pid"
    wrapper = script(tmp_path, f"echo $$ > {pid}; exec sleep 600\n")
    with pytest.raises(DaemonFailed, match=r"failed to start in 0\.5 seconds"):
        await start(program=wrapper, startup_timeout_s=0.5)
    assert not alive(int(pid.read_text()))
    attempt = asyncio.create_task(start(program=wrapper))  # given up by the caller instead
    before = pid.read_text()
    await until(lambda: pid.read_text() not in ("", before))
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert not alive(int(pid.read_text()))


async def test_the_startup_timeout_comes_through_to_hivemind(monkeypatch):
    seen = {}

    async def create(cls, **options):
        seen.update(options)
        raise TimeoutError

    monkeypatch.setattr(P2P, "create", classmethod(create))
    with pytest.raises(DaemonFailed, match="did not start"):
        await start()
    assert seen["startup_timeout"] >= 60
    assert seen["check_if_identity_free"] is False


CHILD = """
import asyncio, sys, time
true_time = time.time
time.time = lambda: true_time() + 7.0  # a machine whose clock is off
from swarm.hive import Hive
from swarm.identity import Identity
from swarm.records import RecordPolicy

async def main():
    hive = await Hive.start(identity=Identity.generate(), record_policy=RecordPolicy(bytes(range(32))))
    print(hive.daemon.pid, *await hive.addresses(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_another_process_with_another_clock_and_its_p2pd_when_it_is_killed(tmp_path):
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "ignore", "-c", CHILD),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # its folder stays until another one is made
    )
    try:
        async with asyncio.timeout(60):
            pid, address = (await child.stdout.readline()).decode().split()
        with pytest.raises(ClockSkew, match="behind") as refused:
            await start([address])
        assert skew_named(refused) == pytest.approx(7.0, abs=1.0)
        assert alive(int(pid))
    finally:
        child.kill()
        await child.wait()
    await until(lambda: not alive(int(pid)))  # it must not outlive its process


async def test_closing_leaves_nothing_behind(founder, slow):
    await slow  # its own tasks begin when it is ready
    tasks = asyncio.all_tasks()
    hive = await start(await founder.addresses())
    ended = asyncio.Event()

    async def forever(peer_id, reader, writer):
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    await hive.serve("forever", forever)
    reader, writer = await founder.open(hive.peer_id, "forever", 5.0)
    await until(lambda: hive.daemon._streams)
    pid, folder = hive.daemon.pid, hive.daemon._life._folder.name
    assert os.stat(folder).st_mode & 0o777 == 0o700 and "identity" not in os.listdir(folder)
    await hive.close()
    await hive.close()  # twice does no harm
    assert await reader.read() == b""
    writer.close()
    assert ended.is_set() and not alive(pid) and folder not in os.listdir(os.path.dirname(folder))
    # hivemind's own calls to nodes end by themselves within its 3 s.
    await until(lambda: not {task for task in asyncio.all_tasks() - tasks if re.search("hive|p2pd", repr(task))})
    with pytest.raises(DaemonFailed, match="closed"):
        await hive.fetch([KEY], 5.0)


async def test_a_frozen_p2pd_is_ended_by_force():
    hive = await start()
    pid = hive.daemon.pid
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: stopped(pid))
    waiting = asyncio.create_task(hive.addresses(60.0))
    await until(lambda: hive.daemon._life._deadlines)
    closing = asyncio.create_task(hive.close())
    async with asyncio.timeout(1.0):
        with pytest.raises(DaemonFailed, match="own addresses: p2pd has ended"):
            await waiting
    await closing
    assert not alive(pid)


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
async def test_in_a_thread_on_either_kind_of_loop(founder, run):
    """As the synchronous interface runs it, inside of a program with a loop of its own."""
    addresses = await founder.addresses()

    async def visit() -> list[str]:
        async with await start(addresses) as hive:
            await hive.serve_blob("visit", lambda: b"blob")
            await directory(hive).announce(record(hive, span=Span(29, 30)))
            back = asyncio.Event()

            async def after_restart() -> None:
                back.set()

            hive.daemon.on_restart.append(after_restart)
            os.kill(hive.daemon.pid, signal.SIGKILL)
            await asyncio.wait_for(back.wait(), 15.0)
            found = [peer.peer_id for peer in await directory(hive).refresh()]
            await directory(hive).leave()
            return [hive.peer_id, *found]

    me, *found = await asyncio.to_thread(run, visit())
    assert me in found


async def test_a_slow_p2pd_is_waited_for(slow):
    hive, took = await slow
    assert took >= 20
    assert await hive.addresses()
