import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testbed.counters import Counters
from testbed.errors import ProgramFailed, TestbedError
from testbed.launch import Program, wait_for_all
from testbed.measure import measure_rtt_ms
from testbed.network import Network
from testbed.nodes.namespace import User
from testbed.plan import CORE
from testbed.probe import probe
from testbed.sockets import SocketWatch
from testbed.topology import load_topology, topology_from

THREE = {
    "name": "three",
    "sites": {"a": {"nodes": 1}, "b": {"nodes": 1}, "c": {"nodes": 1}},
    "wan": {
        "uplink": {"rate_mbps": 200},
        "pairs": [
            {"between": ["a", "b"], "rtt_ms": 10},
            {"between": ["a", "c"], "rtt_ms": 40},
            {"between": ["b", "c"], "rtt_ms": 100},
        ],
    },
}


def start(network: Network, node: str, command: list[str], output=subprocess.PIPE, **env: str):
    return network.nodes[node].start_program(command, network.user, env, output, Path("/"))


def test_a_gigabit_and_30_ms_are_what_the_probe_measures():
    with Network(load_topology("two-sites-1gbps")) as network:
        result = probe(network)
    assert result.problems == []
    assert {(p.source, p.target) for p in result.pairs} == {("north", "south"), ("south", "north")}


def test_any_matrix_of_rtts_is_kept_also_one_that_no_sum_of_site_delays_gives():
    with Network(topology_from(THREE, "three")) as network:
        for one, other, rtt in (("a", "b", 10), ("a", "c", 40), ("b", "c", 100)):
            assert measure_rtt_ms(network, f"{one}-0", f"{other}-0") == pytest.approx(
                rtt, abs=max(1, 0.02 * rtt)
            )


def test_packets_are_lost_and_jittered_as_asked_and_never_reordered():
    with Network(load_topology("lossy-internet")) as network:
        network.nodes["home-0"].run(["sh", "-c", "ping -n -i 0.005 -c 600 -w 20 10.2.1.2 > /tmp/pings"])
        out = network.nodes["home-0"].run(["cat", "/tmp/pings"])
        assert probe(network).problems == []
    order = [int(n) for n in re.findall(r"icmp_seq=(\d+)", out)]
    times = [float(t) for t in re.findall(r"time=([\d.]+)", out)]
    assert order == sorted(order)
    assert max(times) - min(times) > 1.5  # two independent draws of ±2 ms
    assert 56 <= statistics.median(times) <= 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["tc", "class", "change", "dev", "up", "parent", "1:1", "classid", "1:10"]
         + ["htb", "rate", "500mbit", "ceil", "500mbit", "burst", "64k", "cburst", "64k", "quantum", "60000"], "Mbit/s of payload"),
        (["tc", "qdisc", "del", "dev", "up", "root"], "Mbit/s of payload"),
    ],
    ids=["slower", "unshaped"],
)  # fmt: skip
def test_a_link_that_does_not_meet_its_rate_is_found_by_measuring(change, said):
    slow = json.loads(json.dumps(THREE))
    del slow["sites"]["c"]
    slow["wan"]["pairs"] = slow["wan"]["pairs"][:1]
    slow["wan"]["uplink"] = {"up_mbps": 900, "down_mbps": 2000}
    with Network(topology_from(slow, "slow")) as network:
        network.nodes["a-router"].run(change)
        problems = probe(network).problems
    assert any("a-b" in problem and said in problem for problem in problems), problems


def test_an_rtt_that_is_off_is_found_by_measuring():
    topology = load_topology("two-sites-1gbps")
    with Network(topology) as network:
        if network.delay == "nfqueue":
            network.nodes[CORE].run(["iptables", "-t", "mangle", "-D", "FORWARD", "1"])
        else:
            network.nodes[CORE].run(
                ["tc", "qdisc", "change", "dev", "s1", "parent", "1:100", "netem", "delay", "1ms"]
            )
        assert any("RTT" in problem for problem in probe(network).problems)


def test_links_go_dark_and_not_fast_when_the_delay_line_dies():
    with Network(load_topology("two-sites-1gbps")) as network:
        if network.delay_line is None:
            pytest.skip("netem delays here: there is no process to die")
        network.delay_line.kill()
        network.delay_line.wait()
        assert not network.delay_alive()
        with pytest.raises(TestbedError):
            measure_rtt_ms(network, "north-0", "south-0")
        assert measure_rtt_ms(network, "north-0", "north-1") < 1.0  # the LAN does not depend on it


def test_programs_are_unprivileged_with_their_own_tmp_hosts_and_process_tree():
    script = """
import os, pathlib, socket
print(os.getuid(), os.getpid())
pathlib.Path('/tmp/mine').write_text('x')
print(sorted(os.listdir('/tmp')), socket.gethostbyname('south-1'))
print([l for l in open('/proc/self/status') if l.startswith(('CapEff', 'CapBnd', 'NoNewPrivs'))])
try:
    socket.getaddrinfo('no-such-host.invalid', 80)
except OSError as error:
    print('quick', error.errno)
"""
    with Network(load_topology("two-sites-1gbps")) as network:
        began = time.monotonic()
        program = start(network, "north-0", [sys.executable, "-c", script])
        out, _ = program.communicate(timeout=20)
        assert time.monotonic() - began < 5, "name look-ups stall"
    lines = out.splitlines()
    uid, pid = map(int, lines[0].split())
    assert uid == User.invoking().uid != 0
    assert pid < 5  # in its own PID namespace
    assert "'mine'" in lines[1]
    assert "10.2.2.2" in lines[1]
    assert "CapEff:\\t0000000000000000" in lines[2]
    assert "CapBnd:\\t0000000000000000" in lines[2]
    assert "NoNewPrivs:\\t1" in lines[2]
    assert lines[3].startswith("quick")
    assert not Path("/tmp/mine").exists()


def test_bytes_are_counted_by_the_qdisc_with_every_header_and_by_ss_without_any(tmp_path):
    receiver = """
import socket
server = socket.create_server(('10.2.1.2', 7000))
print('listening', flush=True)
peer, _ = server.accept()
while peer.recv(1 << 20):
    pass
"""
    sender = "import socket; s = socket.create_connection(('10.2.1.2', 7000)); s.sendall(bytes(20_000_000)); s.close()"
    with Network(load_topology("two-sites-1gbps")) as network, Counters(network) as counters:
        with SocketWatch(network, tmp_path) as watch:
            south = start(network, "south-0", [sys.executable, "-c", receiver])
            assert south.stdout.readline() == "listening\n"
            before = counters.read()
            start(network, "north-0", [sys.executable, "-c", sender]).wait(timeout=20)
            south.wait(timeout=20)
            after = counters.read()
            acked = sum(f.acked_bytes for f in watch.flows() if f.node == "north-0")
        wire = after["north/up"].tx_bytes - before["north/up"].tx_bytes
        assert acked == pytest.approx(20_000_000, abs=10)
        assert wire / acked == pytest.approx(1514 / 1448, rel=0.002)
        assert all(reading.direct_packets == 0 for reading in after.values())
        assert after["south/down"].tx_bytes - before["south/down"].tx_bytes == pytest.approx(wire, rel=0.001)


def test_rendezvous_traffic_is_counted_apart():
    receiver = """
import socket
server = socket.create_server(('10.1.1.2', 29500))
print('listening', flush=True)
peer, _ = server.accept()
while peer.recv(1 << 20):
    pass
"""
    sender = "import socket; s = socket.create_connection(('10.1.1.2', 29500)); s.sendall(bytes(1_000_000)); s.close()"
    with Network(load_topology("two-sites-1gbps")) as network, Counters(network) as counters:
        north = start(network, "north-0", [sys.executable, "-c", receiver])
        assert north.stdout.readline() == "listening\n"
        before = counters.read()
        start(network, "south-0", [sys.executable, "-c", sender]).wait(timeout=20)
        north.wait(timeout=20)
        after = counters.read()
    control = after["south/up"].control_bytes - before["south/up"].control_bytes
    total = after["south/up"].tx_bytes - before["south/up"].tx_bytes
    assert control == pytest.approx(1_000_000 * 1514 / 1448, rel=0.01)
    assert total - control < 1000  # nothing but ARP


def test_two_networks_at_once_do_not_touch():
    topology = load_topology("two-sites-1gbps")
    with Network(topology) as one, Network(topology) as other:
        assert one.session.id != other.session.id
        assert measure_rtt_ms(one, "north-0", "south-0") == pytest.approx(30, abs=1)
        assert measure_rtt_ms(other, "north-0", "south-0") == pytest.approx(30, abs=1)
        one.__exit__(None, None, None)
        assert measure_rtt_ms(other, "north-0", "south-0") == pytest.approx(30, abs=1)


def descendants(pid: int) -> list[int]:
    children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [d for c in children for d in descendants(c)]


def programs(network: Network, tmp_path: Path, commands: dict[str, str]) -> list[Program]:
    result = []
    for node, script in commands.items():
        log = tmp_path / f"{node}.log"
        with log.open("wb") as output:
            result.append(Program(node, start(network, node, ["sh", "-c", script], output), log))
    return result


def test_the_node_that_dies_is_named_with_its_log(tmp_path):
    with Network(load_topology("lan-10g")) as network:
        running = programs(network, tmp_path, {"hall-0": "sleep 60", "hall-1": "echo oh; exit 3"})
        with pytest.raises(ProgramFailed, match=r"node hall-1: exited with status 3.*hall-1\.log") as caught:
            wait_for_all(running)
        assert caught.value.node == "hall-1"
        assert (tmp_path / "hall-1.log").read_text() == "oh\n"


def test_a_killed_node_is_blamed_and_not_the_one_that_complains_about_it(tmp_path):
    with Network(load_topology("lan-10g")) as network:
        running = programs(network, tmp_path, {"hall-0": "sleep 0.5; exit 1", "hall-1": "sleep 60"})
        running[0].process.wait(timeout=5)
        os.kill(descendants(running[1].process.pid)[-1], signal.SIGKILL)
        with pytest.raises(ProgramFailed, match="node hall-1: killed by signal 9"):
            wait_for_all(running)


def test_a_program_without_progress_is_named_and_a_busy_or_sending_one_is_not(tmp_path):
    with Network(load_topology("lan-10g")) as network:
        running = programs(
            network,
            tmp_path,
            {"hall-0": "while true; do :; done", "hall-1": "sleep 100", "hall-2": "sleep 100"},
        )
        began = time.monotonic()
        ticking = {"hall-2": 0}

        def sent() -> dict[str, int]:
            ticking["hall-2"] += 1
            return dict(ticking)

        with pytest.raises(ProgramFailed, match="node hall-1: made neither CPU nor byte progress for 3 s"):
            wait_for_all(running, stall_s=3, sent_bytes=sent)
        assert time.monotonic() - began < 10


def test_everything_a_program_started_dies_with_it():
    with Network(load_topology("lan-10g")) as network:
        program = start(network, "hall-0", ["sh", "-c", "setsid sleep 1234 & setsid sleep 1234 & wait"])
        deadline = time.monotonic() + 5
        while _sleepers() < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert _sleepers() == 2
        os.kill(program.pid, signal.SIGKILL)
        program.wait(timeout=5)
        while _sleepers() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert _sleepers() == 0


def _sleepers() -> int:
    found = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found += (entry / "cmdline").read_bytes() == b"sleep\x001234\x00"
            except OSError:
                continue
    return found


def test_an_error_while_building_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(Network, "_start_delay", lambda self: (_ for _ in ()).throw(TestbedError("no")))
    with pytest.raises(TestbedError, match="no"), Network(load_topology("two-sites-1gbps")):
        pass
