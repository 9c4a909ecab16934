"""Laws of what is read from the kernel and of how it is judged; no root needed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed import lateness
from testbed.fidelity import CpuTimes, MachineState, judge, throttled_s
from testbed.launch import describe_exit
from testbed.plan import plan_network
from testbed.probe import AT_ONCE_MBPS, Measured, Probe, batches
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
    plan = plan_network(topology)
    delays = plan.delays
    rates = [plan.wan_rate_mbps(d.source, d.target) for d in delays]
    groups = batches(delays, rates)
    assert sorted(i for group in groups for i in group) == list(range(len(delays)))
    for group in groups:
        sites = [site for i in group for site in (delays[i].source, delays[i].target)]
        assert len(set(sites)) == len(sites)
        assert sum(rates[i] for i in group) <= AT_ONCE_MBPS
    assert len(groups) == {"home-volunteers": 6, "china-hubs": 6, "two-sites-1gbps": 2}[name]


def released(*late_ms: float, drops: int = 0) -> dict:
    """The statistics of a delay line that released packets so late."""
    line = lateness.Lateness()
    for late in late_ms:
        line.add(late / 1e3)
    return {**line.row(), "drops": drops}


BUSY_BEFORE = (90.0,) * 50  # what happened before the programs started is not theirs
QUIET = BUSY_BEFORE + (0.04,) * 980 + (0.2,) * 19 + (0.9,)


def state(t=0.0, cpu=(0, 0, 0, 0), throttled=0.0, stats=None) -> MachineState:
    return MachineState(t, CpuTimes(*cpu), throttled, stats or released(*BUSY_BEFORE))


def fidelity(**changes):
    after = {"t": 100.0, "cpu": (500, 10, 5, 1000), "throttled": 0.5, "stats": released(*QUIET)}
    rest = {
        "delay_alive": True,
        "shortest_delay_ms": 15.0,
        "direct_packets": {"north/up": 0},
        "dropped_packets": 0,
    }
    after |= {key: changes.pop(key) for key in list(changes) if key in after}
    return judge(before=state(), after=state(**after), **{**rest, **changes})


def test_a_quiet_machine_is_believed_whatever_happened_before():
    result = fidelity()
    assert result.problems == []
    assert result.cpu_busy_share == 0.5
    assert result.throttled_share == 0.005
    assert result.delay_line_packets == 1000
    assert result.lateness_p50_ms == pytest.approx(0.04, rel=0.07)
    assert result.lateness_p99_ms == pytest.approx(0.2, rel=0.07)
    assert result.lateness_max_ms == pytest.approx(0.9, rel=0.07)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"delay_alive": False}, "died"),
        ({"stats": released(*QUIET, *[1.3] * 20)}, "late: p99 1."),
        ({"stats": released(*QUIET, 30.0)}, "late: at worst 3"),
        ({"stats": released(*QUIET, drops=3)}, "dropped 3"),
        ({"direct_packets": {"north/up": 7}}, "north/up: 7 packets went out unshaped"),
        ({"cpu": (500, 10, 100, 1000)}, "hypervisor"),
        ({"throttled": 2.0}, "quota held this machine back for 2.0 %"),
    ],
)
def test_each_broken_promise_is_a_problem(changes, said):
    problems = fidelity(**changes).problems
    assert len(problems) == 1
    assert said in problems[0]


def test_a_lateness_that_a_long_delay_hides_is_allowed():
    late = released(*QUIET, *[1.3] * 20, 40.0)
    assert fidelity(stats=late, shortest_delay_ms=100.0).problems == []


@pytest.mark.parametrize("version", [1, 2])
def test_throttling_is_read_from_the_groups_we_are_in_and_those_above(tmp_path, version):
    name, nanoseconds = ("cpu,cpuacct/", 1) if version == 1 else ("", 0)
    for path, seconds in (("", 1), ("a", 2), ("a/b", 4), ("other", 8)):
        folder = tmp_path / name / path
        folder.mkdir(parents=True, exist_ok=True)
        line = f"throttled_time {seconds * 10**9}" if nanoseconds else f"throttled_usec {seconds * 10**6}"
        (folder / "cpu.stat").write_text(f"nr_periods 1\n{line}\n")
    membership = "3:cpu,cpuacct:/a/b\n2:memory:/other\n" if version == 1 else "0::/a/b\n"
    assert throttled_s(membership, tmp_path) == 7


@given(st.integers(0, 10**10))
def test_a_bucket_holds_its_values_to_a_sixteenth(late_us):
    edge_us = lateness.upper_edge_ms(lateness.bucket(late_us)) * 1e3
    assert edge_us >= late_us + 0.999 or lateness.bucket(late_us) == lateness.BUCKETS - 1
    assert edge_us <= late_us * 17 / 16 + 1.001 or late_us < 16


def test_quantiles_are_those_of_the_values():
    line = lateness.Lateness()
    for late_us in range(1000):
        line.add(late_us / 1e6)
    assert line.row()["p50_ms"] == pytest.approx(0.5, rel=1 / 16)
    assert line.row()["p99_ms"] == pytest.approx(0.99, rel=1 / 16)
    assert line.row()["max_ms"] == pytest.approx(1.0, rel=1 / 16)
    assert lateness.quantile_ms([], 0.99) == 0.0


def test_exit_statuses_are_words():
    assert describe_exit(3) == "exited with status 3"
    assert describe_exit(-9) == describe_exit(137) == "killed by signal 9"
