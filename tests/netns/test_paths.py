"""Paths with figures of their own, and links of single nodes, measured on real networks."""

import subprocess
import sys
import threading

import pytest

from testbed.counters import Counters
from testbed.errors import TestbedError
from testbed.measure import measure_goodput_mbps, measure_mtu_kept
from testbed.network import Network
from testbed.plan import CORE
from testbed.probe import probe
from testbed.shaping import paths
from testbed.topology import topology_from
from testbed.units import goodput_mbps

CAPPED = {
    "name": "capped",
    "sites": {"a": {"nodes": 2}, "b": {"nodes": 1}, "c": {"nodes": 1}},
    "wan": {
        "uplink": {"rate_mbps": 400},
        "pairs": [
            {"between": ["a", "b"], "rtt_ms": 20, "rate_mbps": 100, "mtu": 1200},
            {"between": ["a", "c"], "rtt_ms": 30, "rate_mbps": "350Mbit", "queue_bytes": 2_000_000},
            {"between": ["b", "c"], "rtt_ms": 40},
        ],
    },
}


@pytest.fixture(scope="module")
def capped():
    with Network(topology_from(CAPPED, "capped")) as network:
        yield network


def at_once(network: Network, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], float]:
    """TCP payload rates of flows between nodes that run at the same time, in Mbit/s."""
    got: dict[tuple[str, str], float] = {}

    def flow(n: int, pair: tuple[str, str]) -> None:
        got[pair] = measure_goodput_mbps(network, *pair, seconds=3, omit=1, port=5300 + n, realtime=False)

    threads = [threading.Thread(target=flow, args=(n, pair)) for n, pair in enumerate(pairs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def test_the_probe_finds_every_pair_at_its_cap_or_at_the_uplink_and_every_mtu_kept(capped):
    result = probe(capped)
    assert result.problems == []
    rates = {(m.source, m.target): m.rate_wanted_mbps for m in result.pairs}
    assert rates[("a", "b")] == rates[("b", "a")] == 100
    assert rates[("a", "c")] == 350
    assert rates[("b", "c")] == 400
    assert {(m.source, m.target) for m in result.pairs if m.mtu_kept} == {("a", "b"), ("b", "a")}


def test_each_capped_path_is_at_its_own_rate_while_both_share_the_uplink(capped):
    with Counters(capped) as counters:
        before = counters.read()
        got = at_once(capped, [("a-0", "b-0"), ("a-1", "c-0")])
        after = counters.read()
    small, large = got[("a-0", "b-0")], got[("a-1", "c-0")]
    assert small == pytest.approx(goodput_mbps(100, 1200), rel=0.06)  # its cap, although the uplink is full
    assert large == pytest.approx(
        goodput_mbps(400 - 100), rel=0.1
    )  # less than its cap: what the uplink leaves
    assert all(reading.direct_packets == 0 for reading in after.values())
    assert after["a/up"].tx_bytes > before["a/up"].tx_bytes


def test_a_packet_above_a_paths_mtu_does_not_pass_and_tcp_makes_its_segments_smaller(capped):
    assert measure_mtu_kept(capped, "a-1", "b-0", 1200)
    assert not measure_mtu_kept(capped, "a-1", "b-0", 1199)  # 1200 pass
    assert not measure_mtu_kept(capped, "a-1", "b-0", 1201)  # 1201 do not
    with Counters(capped) as counters:
        before = counters.read()["b/down"]
        measure_goodput_mbps(capped, "a-1", "b-0", seconds=1, omit=0)
        after = counters.read()["b/down"]
    mean = (after.tx_bytes - before.tx_bytes) / (after.tx_packets - before.tx_packets)
    assert mean == pytest.approx(1214, rel=0.03)


long = pytest.mark.long


@pytest.mark.parametrize(
    "change",
    [pytest.param("no cap", marks=long), pytest.param("half a cap", marks=long), "no filter"],
)
def test_the_probe_catches_a_cap_that_is_not_applied(change):
    two = {**CAPPED, "sites": {"a": {}, "b": {}}}
    two["wan"] = {**CAPPED["wan"], "pairs": [{"between": ["a", "b"], "rtt_ms": 10, "rate_mbps": 100}]}
    with Network(topology_from(two, "two")) as network:
        minor = next(m for path, m in paths.classes(network.plan) if path.source == "a")
        core = network.nodes[CORE]
        if change == "no filter":
            core.run(["tc", "filter", "del", "dev", "s2", "parent", "1:", "prio", "2"])
        else:
            rate = "400mbit" if change == "no cap" else "50mbit"
            htb = ["htb", "rate", rate, "ceil", rate, "burst", "50k", "cburst", "50k", "quantum", "60000"]
            where = ["dev", "s2", "parent", "1:1", "classid", f"1:{minor:x}"]
            core.run(["tc", "class", "change", *where, *htb])
        problems = probe(network).problems
    assert any("a-b" in problem and "Mbit/s of payload" in problem for problem in problems), problems


def test_a_network_is_not_up_when_the_kernel_has_another_cap_or_queue(monkeypatch):
    real = paths.path_class
    for module in ("testbed.shaping.paths", "testbed.shaping.netem"):
        monkeypatch.setattr(
            f"{module}.path_class", lambda p, m: real(p, m).replace("ceil 100000000bit", "ceil 200000000bit")
        )
    with (
        pytest.raises(TestbedError, match="path a to b: asked tc for 100 Mbit/s"),
        Network(topology_from(CAPPED, "capped")),
    ):
        pass


TOWER = {
    "name": "tower",
    "sites": {
        "tower": {"nodes": 3, "node_uplink": {"up_mbps": 100, "down_mbps": 200}, "lan": {"up_mbps": 900, "down_mbps": 600}},
        "hub": {"nodes": 3},
    },
    "nodes": {"tower-2": {"uplink": {"up_mbps": 200, "down_mbps": 200}}},
    "wan": {"uplink": {"rate_mbps": 350}, "pairs": [{"between": ["tower", "hub"], "rtt_ms": 10}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def tower():
    with Network(topology_from(TOWER, "tower")) as network:
        yield network


def test_every_nodes_own_uplink_is_measured_both_ways_and_kept(tower):
    result = probe(tower)
    assert result.problems == []
    assert {(link.link, link.rate_wanted_mbps) for link in result.links} == {
        *((f"tower-{k}/wan-up", 200 if k == 2 else 100) for k in range(3)),
        *((f"tower-{k}/wan-down", 200) for k in range(3)),
        ("hub/up", 350),
        ("hub/down", 350),
    }


def test_nodes_have_their_own_rates_and_share_the_sites_and_the_lan_is_faster(tower):
    pairs = [(f"tower-{k}", f"hub-{k}") for k in range(3)]
    got = at_once(tower, pairs)
    assert sum(got.values()) == pytest.approx(goodput_mbps(350), rel=0.05)  # 100 + 100 + 200 do not fit in
    assert got[pairs[0]] <= 1.02 * goodput_mbps(100)
    assert got[pairs[2]] > 1.1 * goodput_mbps(100)
    inside = measure_goodput_mbps(tower, "tower-0", "tower-1")
    assert inside == pytest.approx(goodput_mbps(600), rel=0.03)  # out at 900, in at 600


def test_the_probe_catches_a_nodes_uplink_that_is_not_applied():
    with Network(topology_from(TOWER, "tower")) as network:
        network.nodes["tower-1"].run(["tc", "filter", "del", "dev", "eth0", "parent", "1:", "prio", "2"])
        problems = probe(network).problems
    assert any("link tower-1/wan-up" in problem for problem in problems), problems


OF_SOCKET = "print(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())"
SERVER = f"""
import socket
listening = socket.create_server(("10.2.1.2", 7000))
print("listening")
s, _ = listening.accept()
{OF_SOCKET}
"""
CLIENT = f"import socket; s = socket.create_connection(('10.2.1.2', 7000)); {OF_SOCKET}"


@pytest.mark.parametrize(
    "tcp",
    [
        {"congestion_control": "reno", "buffer_mb": 3, "slow_start_after_idle": True},
        {"congestion_control": "cubic", "buffer_mb": 64, "slow_start_after_idle": False},
    ],
    ids=["reno", "cubic"],
)
def test_tcp_settings_are_those_of_the_kernel_in_every_node_and_of_real_sockets(tcp):
    two = {**CAPPED, "sites": {"a": {}, "b": {}}, "tcp": tcp}
    two["wan"] = {"uplink": {"rate_mbps": 50}, "pairs": [{"between": ["a", "b"], "rtt_ms": 4}]}
    with Network(topology_from(two, "two")) as network:
        for node in ("a-0", "b-0"):
            keys = ["tcp_rmem", "tcp_wmem", "tcp_slow_start_after_idle", "tcp_no_metrics_save"]
            said = (
                network.nodes[node].run(["sysctl", "-n", *(f"net.ipv4.{key}" for key in keys)]).splitlines()
            )
            assert said[0].split()[2] == said[1].split()[2] == str(round(tcp["buffer_mb"] * 1e6))
            assert said[2:] == [str(int(tcp["slow_start_after_idle"])), "1"]
            kept = network.tcp_settings[node]
            assert kept["congestion_control"] == tcp["congestion_control"]
            assert kept["net.ipv4.tcp_rmem"].split() == said[0].split()
        program = [sys.executable, "-u", "-c"]
        server = network.nodes["b-0"].start_root([*program, SERVER], stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "listening\n"
        client = network.nodes["a-0"].run([*program, CLIENT])
        assert [client.strip(), server.communicate(timeout=10)[0].strip()] == [tcp["congestion_control"]] * 2
