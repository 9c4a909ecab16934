"""Three counts of the same bytes: each disagreement is a problem, each agreement is not."""

import pytest

from experiments.accounting import congestion_problems, kernel_bytes, reconcile, wire_bytes
from testbed.counters import Reading
from testbed.plan import plan_network
from testbed.sockets import Flow
from testbed.topology import load_topology

PLAN = plan_network(load_topology("two-sites-1gbps"))
NORTH_0, SOUTH_0, NORTH_1 = "10.1.1.2", "10.2.1.2", "10.1.2.2"
M = 10_000_000


def flow(local, peer, acked, port=40000):
    return Flow("n", local, port, peer, 40001, acked, 5)


def readings(**sent):
    return {
        link.name: Reading(
            0.0, link.name, sent.get(link.name, 0), 0, 0, 0, sent.get(f"{link.name}:control", 0), 0
        )
        for link in PLAN.links
    }


def test_kernel_bytes_are_sorted_by_site_and_rendezvous_is_apart():
    flows = [
        flow(NORTH_0, SOUTH_0, 100),
        flow(SOUTH_0, NORTH_0, 50),
        flow(NORTH_0, NORTH_1, 7),
        flow(NORTH_0, SOUTH_0, 1000, port=29500),
    ]
    assert kernel_bytes(PLAN, flows) == (150, 7, 1000, 20)


def test_each_packet_is_counted_once_though_it_crosses_many_queues():
    before = readings()
    after = readings(
        **{
            # 1000 bytes from north-0 to south-0, 300 from north-0 to north-1, 20 of rendezvous from south-0
            "north-0": 1300,
            "north-1/down": 300,
            "north/up": 1000,
            "south/down": 1000,
            "south-0/down": 1000,
            "south-0": 20,
            "south/up": 20,
            "south/up:control": 20,
            "north/down": 20,
            "north-0/down": 20,
        }
    )
    assert wire_bytes(PLAN, before, after) == (1000, 300, 20)


@pytest.mark.parametrize(
    ("payload", "kernel", "wire", "said"),
    [
        ((M, M, 0), (M, M, 0, 0), (int(1.05 * M), 0, 0), None),
        ((M, M, M), (M, 2 * M, 0, 0), (int(1.05 * M), 0, 0), None),
        ((M, M, 0), (int(1.011 * M), M, 0, 0), (int(1.05 * M), 0, 0), "WAN payload"),
        ((M, M, 0), (int(0.989 * M), M, 0, 0), (int(1.05 * M), 0, 0), "WAN payload"),
        ((M, M, 0), (M, 2 * M, 0, 0), (int(1.05 * M), 0, 0), "LAN payload"),
        ((M, M, 0), (M, M, 0, 0), (int(1.03 * M), 0, 0), "wire bytes"),
        ((M, M, 0), (M, M, 0, 0), (int(1.10 * M), 0, 0), "wire bytes"),
        (
            (M, M, 0),
            (M, M, 0, M // 10),
            (int(1.05 * M), 0, 0),
            None,
        ),  # lost in the uplink's queue: never counted
        ((M, M, 0), (M, M, 0, M // 10), (int(1.15 * M), 0, 0), None),  # lost further on: counted twice
        ((M, M, 0), (M, M, 0, M // 10), (int(1.20 * M), 0, 0), "wire bytes"),
        ((0, M, 0), (M, M, 0, 0), (M, 0, 0), "WAN payload"),  # bytes that nobody says to have sent
        (
            (1000, M, 0),
            (1200, M, 0, 0),
            (9000, 0, 0),
            None,
        ),  # too little to judge: connecting costs that much
    ],
)
def test_counts_that_disagree_are_a_problem(payload, kernel, wire, said):
    problems = reconcile(payload, kernel, wire).problems
    assert [said in p for p in problems] == ([True] if said else [])


def test_what_was_not_measured_is_none():
    result = reconcile((M, M, 0), None, None)
    assert result.problems == []
    assert result.kernel_wan_bytes is result.wan_wire_bytes is result.wan_overhead is None


def test_a_congestion_control_that_nobody_asked_for_is_a_problem():
    ranks = [
        {"rank": 0, "wan_congestion_control": ["cubic"]},
        {"rank": 1, "wan_congestion_control": []},
        {"rank": 2},
    ]
    assert congestion_problems("cubic", ranks) == []
    ranks[0]["wan_congestion_control"] = ["bbr"]
    assert congestion_problems("cubic", ranks) == [
        "rank 0: TCP ran bbr across the WAN, the topology asked for cubic"
    ]
