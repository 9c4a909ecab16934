"""Laws of what is read from the kernel and of how it is judged; no root needed."""

from dataclasses import replace

import pytest

from testbed.fidelity import CpuTimes, judge
from testbed.launch import describe_exit
from testbed.plan import plan_network
from testbed.probe import AT_ONCE_MBPS, Measured, Probe, batches
from testbed.shaping.delayline import BUCKET_US, Lateness
from testbed.sockets import parse_flows
from testbed.topology import load_topology

SS = """ESTAB 0      0              10.1.1.2:36518         10.2.1.2:5999
\t cubic wscale:10,10 rto:204 bytes_sent:440 bytes_retrans:40 bytes_acked:401 bytes_received:315
UNCONN 1      0      [::ffff:10.1.1.2]:29500  [::ffff:10.2.1.2]:40000
\t cubic bytes_sent:314 bytes_acked:315 bytes_received:441
UNCONN 0      0                       *:5999                   *:*
\t rto:1000 mss:536 cwnd:10
"""


def test_flows_are_read_with_both_ends_and_control_is_told_by_its_port():
    flows = parse_flows("north-0", SS)
    assert [(f.peer, f.acked_bytes, f.retransmitted_bytes, f.is_control) for f in flows] == [
        ("10.2.1.2", 401, 40, False),
        ("10.2.1.2", 315, 0, True),
    ]


def measured(rtt=30.0, goodput=956.4, rtt_wanted=30.0):
    return Measured("a", "b", rtt_wanted, rtt, 1000, 956.4, goodput)


def lossy(lost, packets=10_000, loss=0.001):
    return replace(measured(), loss_wanted=loss, packets=packets, lost=lost)


@pytest.mark.parametrize(
    ("pair", "problems"),
    [
        (lossy(10), 0),
        (lossy(0), 0),  # 10 ± 4 sigma of 3.2 + 1
        (lossy(23), 0),
        (lossy(24), 1),
        (lossy(70, loss=0.01), 0),
        (lossy(50, loss=0.01), 1),
        (replace(measured(rtt=32.5), jitter_wanted_ms=2.0), 0),
        (replace(measured(rtt=33.5), jitter_wanted_ms=2.0), 1),
        (measured(), 0),
        (measured(rtt=30.99), 0),
        (measured(rtt=31.01), 1),
        (measured(rtt=28.9), 1),
        (measured(rtt=203.9, rtt_wanted=200), 0),  # 2 % of 200 ms is 4 ms
        (measured(rtt=204.1, rtt_wanted=200), 1),
        (measured(goodput=928), 0),
        (measured(goodput=927), 1),
        (measured(goodput=986), 1),  # too fast is as wrong as too slow
        (measured(rtt=0.2, goodput=9000), 2),
    ],
)
def test_a_link_that_is_off_is_named(pair, problems):
    assert len(pair.problems) == problems
    assert pair.row()["ok"] == (not problems)


def test_the_last_measurement_of_a_pair_counts_and_all_are_kept():
    hiccup = Probe((measured(goodput=800), measured()), 1.0)
    assert (len(hiccup.measured), hiccup.problems) == (2, [])
    assert Probe((measured(), measured(goodput=800)), 1.0).problems


@pytest.mark.parametrize("name", ["home-volunteers", "china-hubs", "two-sites-1gbps"])
def test_pairs_measured_at_once_share_no_site_and_all_are_measured_once(name):
    topology = load_topology(name)
    delays = plan_network(topology).delays
    rates = [topology.wan_rate_mbps(d.source, d.target) for d in delays]
    groups = batches(delays, rates)
    assert sorted(i for group in groups for i in group) == list(range(len(delays)))
    for group in groups:
        sites = [site for i in group for site in (delays[i].source, delays[i].target)]
        assert len(set(sites)) == len(sites)
        assert sum(rates[i] for i in group) <= AT_ONCE_MBPS
    assert len(groups) == {"home-volunteers": 6, "china-hubs": 6, "two-sites-1gbps": 2}[name]


QUIET = {"p50_ms": 0.04, "p99_ms": 0.2, "max_ms": 0.9, "packets": 1000, "drops": 0}
EMPTY = CpuTimes(0, 0, 0, 0)


def fidelity(**changes):
    arguments = {
        "before": EMPTY,
        "after": CpuTimes(500, 10, 5, 1000),
        "delay_stats": QUIET,
        "delay_alive": True,
        "shortest_delay_ms": 15.0,
        "direct_packets": {"north/up": 0},
        "dropped_packets": 0,
    }
    return judge(**{**arguments, **changes})


def test_a_quiet_machine_is_believed():
    result = fidelity()
    assert result.problems == []
    assert result.cpu_busy_share == 0.5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"delay_alive": False}, "died"),
        ({"delay_stats": {**QUIET, "p99_ms": 1.2}}, "late"),
        ({"delay_stats": {**QUIET, "drops": 3}}, "dropped 3"),
        ({"direct_packets": {"north/up": 7}}, "north/up: 7 packets went out unshaped"),
        ({"after": CpuTimes(500, 10, 100, 1000)}, "hypervisor"),
    ],
)
def test_each_broken_promise_is_a_problem(changes, said):
    problems = fidelity(**changes).problems
    assert len(problems) == 1
    assert said in problems[0]


def test_lateness_quantiles_are_within_one_bucket_of_the_truth():
    lateness = Lateness()
    for late_us in range(1000):
        lateness.add(late_us / 1e6)
    assert lateness.quantile_ms(0.5) == pytest.approx(0.5, abs=BUCKET_US / 1e3)
    assert lateness.quantile_ms(0.99) == pytest.approx(0.99, abs=BUCKET_US / 1e3)
    assert lateness.max_s == pytest.approx(999e-6)
    assert Lateness().quantile_ms(0.99) == 0.0


def test_exit_statuses_are_words():
    assert describe_exit(3) == "exited with status 3"
    assert describe_exit(-9) == describe_exit(137) == "killed by signal 9"
