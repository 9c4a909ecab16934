"""The TCP transport among threads: right bits whatever the pieces, exact bytes, the right one blamed."""

import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from trainer.collectives import Exchange
from trainer.links import PeerLinks
from trainer.metrics import Ledger
from trainer.peers import MismatchError, Peer, PeerLost, own_address
from trainer.transfer import PIECE_BYTES, Phase

BYTES_ACKED_OFFSET = 120
PIECE = PIECE_BYTES // 4
NUMELS = [0, 1, 2, 3, 7, PIECE - 1, PIECE, 3 * PIECE + 1, 12 * PIECE + 5]


@pytest.fixture
def connect(monkeypatch):
    """`connect(size, ...)` gives every member's links of a fresh group; closed at the end."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made: list[PeerLinks] = []

    def connect(size: int, timeouts_s: list[float] | None = None, lanes: int = 2) -> list[PeerLinks]:
        store = HashStore()
        store.set_timeout(timedelta(seconds=10))
        limits = timeouts_s or [10.0] * size
        ranks = [10 * i for i in range(size)]
        links = everybody(size, lambda i: PeerLinks(store, i, ranks, limits[i], lanes))
        made.extend(links)
        return links

    yield connect
    for links in made:
        links.close()


def everybody(size: int, act: Callable[[int], Any]) -> list[Any]:
    """What each member's `act(index)` returned, or the exception that it raised, all at the same time."""

    def caught(index: int) -> Any:
        try:
            return act(index)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(caught, range(size)))


def values(numel: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * numel + index)
    return torch.randn(numel, generator=generator) * 10.0 ** (index - 1)


def row(numel: int, index: int) -> torch.Tensor:
    return torch.full((numel,), index + 1, dtype=torch.uint8)


def swap(links: PeerLinks, peers: list[int], numel: int) -> dict[int, torch.Tensor]:
    """Send `numel` bytes to each of `peers`, return theirs."""
    received = {peer: torch.zeros(numel, dtype=torch.uint8) for peer in peers}
    links.run([Phase(dict.fromkeys(peers, row(numel, links.index)), received)])
    return received


def reference_mean(rows: list[torch.Tensor]) -> torch.Tensor:
    total = rows[0].clone()
    for other in rows[1:]:
        total += other
    return total / len(rows)


@pytest.mark.parametrize(("size", "lanes"), [(2, 1), (2, 3), (3, 2), (4, 1), (5, 2)])
def test_means_are_the_rank_order_sum_to_the_bit_and_counted(connect, size, lanes):
    def act(index: int) -> None:
        exchange = Exchange(None, "exposed_comm_s", links[index])
        for numel in NUMELS:
            before = exchange.sent_bytes
            mean = exchange.mean(values(numel, index), "fp32", "tuned", Ledger())
            assert torch.equal(mean, reference_mean([values(numel, i) for i in range(size)])), numel
            assert exchange.sent_bytes - before == exchange.planned_mean_bytes(numel, "fp32", "tuned")

    links = connect(size, lanes=lanes)
    assert everybody(size, act) == [None] * size


def test_all_bytes_of_a_mean_together_are_twice_all_shards_but_one():
    sent = []
    for index in range(5):
        exchange = Exchange.__new__(Exchange)
        exchange.size, exchange.index = 5, index
        sent.append(exchange.planned_mean_bytes(23, "fp32", "tuned"))
    assert sum(sent) == 2 * 4 * 23 * 4


def test_rows_are_shuffled_and_gathered_in_rank_order(connect):
    sizes = [5, 0, 300_000]

    def act(index: int) -> None:
        exchange, ledger = Exchange(None, "exposed_comm_s", links[index]), Ledger()
        rows = [row(size, 16 * index + target) for target, size in enumerate(sizes)]
        for source, got in enumerate(exchange.shuffle(rows, ledger)):
            assert torch.equal(got, row(sizes[index], 16 * source + index))
        assert exchange.sent_bytes == exchange.planned_shuffle_bytes(sizes)
        for source, got in enumerate(exchange.gather(row(7, index), ledger)):
            assert torch.equal(got, row(7, source))

    links = connect(3)
    assert everybody(3, act) == [None] * 3


def test_pairs_need_nobody_else(connect):
    partner = [1, 0, 3, 2]

    def act(index: int) -> None:
        exchange = Exchange(None, "exposed_comm_s", links[index])
        for turn in range(3 if index < 2 else 1):
            got = exchange.exchange_with(partner[index], row(1000 + turn, index), Ledger())
            assert torch.equal(got, row(1000 + turn, partner[index]))
        exchange.gather(row(3, index), Ledger())

    links = connect(4)
    assert everybody(4, act) == [None] * 4


def test_the_kernel_delivered_payload_framing_and_handshake_and_nothing_else(connect):
    def act(index: int) -> Exchange:
        exchange = Exchange(None, "exposed_comm_s", links[index])
        for numel in NUMELS:
            exchange.mean(values(numel, index), "fp32", "tuned", Ledger())
        return exchange

    links = connect(3)
    for index, exchange in enumerate(everybody(3, act)):
        wanted = exchange.sent_bytes + exchange.framing_bytes
        sockets = [lane.socket for lane in links[index].lanes] + list(links[index].notices.values())
        deadline = time.monotonic() + 5
        while (acked := sum(map(acknowledged, sockets))) < wanted and time.monotonic() < deadline:
            time.sleep(0.01)  # the last acknowledgement is on its way
        opened = index * 3  # a connecting end's SYN counts as one byte
        assert acked - opened == wanted


def acknowledged(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
    return int(struct.unpack_from("=Q", info, BYTES_ACKED_OFFSET)[0])


def test_streams_are_in_flight_together_in_any_order(connect):
    def act(index: int) -> None:
        whole = Exchange(None, "exposed_comm_s", links[index])
        streams = [whole.stream("a"), whole.stream("b")]
        order = (0, 1) if index else (1, 0)  # one alone would deadlock or mix up rows

        def use(n: int) -> list[torch.Tensor]:
            return streams[n].gather(row(2_000_000 + n, index), Ledger())

        with ThreadPoolExecutor(2) as pool:
            for n, rows in zip(order, pool.map(use, order), strict=True):
                assert all(torch.equal(got, row(2_000_000 + n, i)) for i, got in enumerate(rows))
        assert whole.sent_bytes == sum(stream.sent_bytes for stream in streams) == 4_000_001

    links = connect(2)
    assert everybody(2, act) == [None] * 2


def test_a_second_exchange_on_busy_links_is_refused(connect):
    links = connect(2)
    entered = threading.Event()

    def act(index: int) -> None:
        if index == 0:
            with ThreadPoolExecutor(1) as pool:
                first = pool.submit(swap, links[0], [1], 10)
                while not links[0]._busy.locked():
                    time.sleep(0.001)
                with pytest.raises(RuntimeError, match="in flight"):
                    swap(links[0], [1], 10)
                entered.set()
                first.result()
        else:
            assert entered.wait(10)
            swap(links[1], [0], 10)

    assert everybody(2, act) == [None] * 2


def test_a_closed_member_is_noticed_at_once_and_named(connect, monkeypatch):
    monkeypatch.setenv("TESTBED_NODE", "north-0")
    links = connect(3)
    links[2].close()
    began = time.monotonic()
    for error in everybody(2, lambda i: swap(links[i], [j for j in range(3) if j != i], 1000)):
        assert isinstance(error, PeerLost)
        assert error.rank == 20
        assert "rank 20 (north-0, 127.0.0.1)" in str(error)
    assert time.monotonic() - began < 5


def test_a_silent_member_is_blamed_by_those_who_were_only_told(connect):
    links = connect(3, timeouts_s=[0.5, 60.0, 60.0])

    def act(index: int) -> None:
        try:
            swap(links[index], [j for j in range(3) if j != index], 3_000_000)
        finally:
            links[index].close()

    began = time.monotonic()
    first, second = everybody(2, act)  # member 2 never comes
    assert (first.rank, second.rank) == (20, 20)
    assert "moved no byte for 0.5 s" in str(first)
    assert "says rank 0" in str(second)
    assert time.monotonic() - began < 10


def test_a_mean_blames_who_owes_the_first_phase(connect):
    links = connect(3, timeouts_s=[0.5, 60.0, 60.0])

    def act(index: int) -> None:
        Exchange(None, "exposed_comm_s", links[index]).mean(values(1000, index), "fp32", "tuned", Ledger())

    assert [error.rank for error in everybody(2, act)] == [20, 20]


def test_members_who_disagree_about_the_size_are_told(connect):
    links = connect(2)
    first, second = everybody(2, lambda i: swap(links[i], [1 - i], 100 + i))
    errors = [error for error in (first, second) if isinstance(error, MismatchError)]
    assert errors
    assert "the ranks disagree" in str(errors[0])
    with pytest.raises(RuntimeError):  # links that failed half-way are not used again
        swap(links[0], [1], 100)


def test_a_member_may_be_one_exchange_ahead(connect):
    links = connect(3)
    late = threading.Event()

    def act(index: int) -> int:
        if index == 2:
            assert late.wait(10)
        others = [j for j in range(3) if j != index]
        if index < 2:  # these two go on while member 2 has not begun
            swap(links[index], [1 - index], 5)
            late.set()
        total = 0
        for numel in (3_000_000, 17):
            total += sum(int(got[-1]) for got in swap(links[index], others, numel).values())
        return total

    assert everybody(3, act) == [2 * (2 + 3), 2 * (1 + 3), 2 * (1 + 2)]


def test_a_late_member_passes_on_what_had_come_before_it_came(connect):
    """Nothing more arrives that could wake it: the others wait for its shard."""
    links = connect(3)

    def act(index: int) -> float:
        if index == 0:
            for peer in (1, 2):
                theirs = [lane.socket for lane in links[0].lanes if lane.peer == peer]
                assert select.select(theirs, [], [], 5)[0]
        exchange = Exchange(None, "exposed_comm_s", links[index])
        began = time.monotonic()
        exchange.mean(values(1, index), "fp32", "tuned", Ledger())
        return time.monotonic() - began

    assert max(everybody(3, act)) < 5  # the limit of a wait is 10


def test_strangers_and_absent_members_are_told_apart(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    with pytest.raises(PeerLost, match="rank 7 did not come"):
        PeerLinks(store, 0, [3, 7], 0.5)


def test_a_stranger_is_turned_away(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = HashStore()
    store.set_timeout(timedelta(seconds=10))

    def act(index: int) -> PeerLinks:
        if index == 1:
            store.wait(["addresses/0"], timedelta(seconds=10))
            peer = Peer.from_json(store.get("addresses/0"))
            with socket.create_connection((peer.host, peer.port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
        return PeerLinks(store, index, [0, 1], 10)

    both = everybody(2, act)
    assert everybody(2, lambda i: int(swap(both[i], [1 - i], 9)[1 - i][0])) == [2, 1]
    for links in both:
        links.close()


def test_own_address_faces_the_master_where_no_interface_is_named():
    assert own_address({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}) == "127.0.0.1"
    assert own_address({"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
