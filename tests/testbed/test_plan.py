import itertools
import re

import pytest

from testbed.errors import TestbedError
from testbed.plan import plan_network
from testbed.shaping import netem, nfqueue, rate
from testbed.topology import load_topology, topology_from


def star(sites: int, asymmetric: bool = False):
    names = [f"s{i}" for i in range(sites)]
    uplink = {"up_mbps": 20, "down_mbps": 200} if asymmetric else {"rate_mbps": 100}
    pairs = [
        {"between": list(pair), "rtt_ms": 10 + 7 * n}
        for n, pair in enumerate(itertools.combinations(names, 2))
    ]
    data = {
        "name": "star",
        "sites": {name: {"nodes": 2} for name in names},
        "wan": {"uplink": uplink, "pairs": pairs},
    }
    return topology_from(data, "star")


@pytest.mark.parametrize("sites", [2, 3, 5])
def test_both_delay_mechanisms_give_every_ordered_pair_half_its_rtt(sites):
    topology = star(sites)
    plan = plan_network(topology)
    # netem: the class chosen by source subnet on the egress towards the target
    filters, delays = {}, {}
    for line in netem.commands(plan):
        if match := re.search(r"dev (\w+) parent 1:(\w+) .*netem delay (\d+)us", line):
            delays[match[1], match[2]] = int(match[3]) / 1e3
        if match := re.search(r"dev (\w+) .*match ip src (\S+) flowid 1:(\w+)", line):
            filters[match[1], match[2]] = match[3]
    by_netem = {
        (d.source, d.target): delays[d.to_interface, filters[d.to_interface, d.source_subnet]]
        for d in plan.delays
    }
    # NFQUEUE: the queue chosen by the core's interfaces
    queues = {q.number: q for q in nfqueue.queues(plan)}
    by_nfqueue = {}
    for rule, delay in zip(nfqueue.rules(plan), plan.delays, strict=True):
        assert rule[rule.index("-i") + 1] == delay.from_interface
        assert rule[rule.index("-o") + 1] == delay.to_interface
        by_nfqueue[delay.source, delay.target] = queues[int(rule[-1])].delay_ms
    wanted = {(a, b): topology.rtt_ms(a, b) / 2 for a, b in itertools.permutations(topology.sites, 2)}
    assert by_netem == pytest.approx(wanted)
    assert by_nfqueue == pytest.approx(wanted)


def test_the_plan_is_a_value_that_does_not_depend_on_the_mechanism():
    one = plan_network(star(3))
    forced = star(3).model_copy(update={"delay": "netem"})
    other = plan_network(forced)
    assert one.links == other.links
    assert one.delays == other.delays
    assert one.veths == other.veths


def test_loss_reaches_both_mechanisms_and_jitter_the_one_that_keeps_the_order():
    plan = plan_network(load_topology("lossy-internet"))
    assert [(q.jitter_ms, q.loss) for q in nfqueue.queues(plan)] == [(2, 0.001)] * 2
    assert sum("loss 0.1%" in line for line in netem.commands(plan)) == 2


def test_delays_never_bypass_the_delay_line():
    for rule in nfqueue.rules(plan_network(star(3))):
        assert "--queue-bypass" not in rule


def test_asymmetric_uplinks_are_shaped_at_the_sending_end():
    plan = plan_network(star(2, asymmetric=True))
    assert plan.link("s0/up").rate_mbps == 20
    assert plan.link("s0/up").owner == "s0-router"
    assert plan.link("s0/down").rate_mbps == 200
    assert plan.link("s0/down").owner == "wan-core"


def test_every_packet_between_sites_is_counted_by_exactly_one_uplink():
    plan = plan_network(star(4))
    assert sorted(plan.uplinks) == sorted(plan.topology.sites)
    assert all(plan.link(link).counts_control for link in plan.uplinks.values())
    assert sum(link.counts_control for link in plan.links) == len(plan.topology.sites)


def test_interface_names_fit_the_kernel_and_addresses_are_unique():
    plan = plan_network(star(5))
    ends = [end for veth in plan.veths for end in (veth.left, veth.right)]
    assert all(len(interface) <= 15 for _, interface, _ in ends)
    assert len({address for _, _, address in ends}) == len(ends)
    assert len({(owner, interface) for owner, interface, _ in ends}) == len(ends)


@pytest.mark.parametrize("rate_mbps", [0.008, 0.5, 10, 1000, 10000])
def test_burst_never_lets_a_short_transfer_run_ahead_of_the_rate(rate_mbps):
    burst = rate.burst_bytes(rate_mbps)
    assert burst == max(2 * 1514, round(rate_mbps * 125))


def test_netem_holds_what_is_in_flight_and_the_queue():
    plan = plan_network(load_topology("two-sites-1gbps"))
    for delay in plan.delays:
        assert netem.limit_packets(delay) * 1514 >= 1e9 / 8 * 0.015 + delay.queue_bytes
        # the bytes are bounded below netem: its own limit counts a super-packet of 45 segments as one packet
        below = [
            line for line in netem.commands(plan) if f"dev {delay.to_interface} " in line and "bfifo" in line
        ]
        assert [line.split()[-2:] for line in below] == [["limit", str(delay.queue_bytes)]]


GOOD = """class htb 1:10 parent 1:1 leaf 10: prio 0 rate 990Mbit ceil 1Gbit burst 124863b cburst 125000b
class htb 1:1 root rate 1Gbit ceil 1Gbit burst 125000b cburst 125000b
class htb 1:20 parent 1:1 leaf 20: prio 0 rate 10Mbit ceil 1Gbit burst 125000b cburst 125000b
"""


def test_what_the_kernel_made_of_a_rate_is_compared_with_what_was_asked():
    link = plan_network(load_topology("two-sites-1gbps")).link("north/up")
    rate.verify(link, GOOD)
    for bad in ("", GOOD.replace("ceil 1Gbit", "ceil 10Gbit"), GOOD.replace("1:20", "1:30")):
        with pytest.raises(TestbedError, match="north/up"):
            rate.verify(link, bad)
