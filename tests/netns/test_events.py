"""Events on real links: each change is measured from inside the network, at its time, and is gone afterwards."""

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
from testbed.errors import ProgramFailed
from testbed.events.conductor import Conductor
from testbed.events.live import OpenTc
from testbed.launch import Program, wait_for_all
from testbed.network import Network
from testbed.plan import CORE
from testbed.probe import probe
from testbed.programs import Programs
from testbed.topology import topology_from

PING = re.compile(r"\[([\d.]+)\].*icmp_seq=(\d+) .*time=([\d.]+) ms")


def topology(*events: dict, sites: str = "ab", **changes):
    pairs = [
        {"between": [one, other], "rtt_ms": 20} for n, one in enumerate(sites) for other in sites[n + 1 :]
    ]
    data = {
        "name": "changing",
        "sites": {site: {"nodes": 1} for site in sites},
        "wan": {"uplink": {"rate_mbps": 100}, "pairs": pairs},
        "events": list(events),
    }
    return topology_from({**data, **changes}, "changing")


class Pings:
    """Pings from one node to another while events happen; answers by the time they were sent."""

    def __init__(self, network: Network, source: str, target: str, seconds: float, every_s: float = 0.02):
        count = str(round(seconds / every_s))
        command = ["ping", "-n", "-D", "-i", str(every_s), "-c", count, "-W", "1"]
        self.process = network.nodes[source].start_root(
            [*command, network.plan.node_address[target]], stdout=subprocess.PIPE, text=True
        )

    def answers(self, zero: float) -> list[tuple[float, int, float]]:
        """(seconds since ``zero`` when it was sent, number, round-trip time in ms) of every answer, as they came."""
        out, _ = self.process.communicate(timeout=30)
        offset = time.time() - time.monotonic() + zero
        return [(float(t) - offset - float(ms) / 1e3, int(n), float(ms)) for t, n, ms in PING.findall(out)]


def between(answers, start, end):
    return [ms for t, _, ms in answers if start <= t < end]


def all_in_effect(conductor: Conductor):
    assert conductor.problems() == []
    assert conductor.not_reached() == []
    for one in conductor.happened:
        assert 0 <= one.late_s <= 0.25, one


def play(network: Network, seconds: float, programs: Programs | None = None) -> Conductor:
    with Conductor(network, network.topology.events, programs) as conductor:
        time.sleep(seconds)
    return conductor


def test_an_rtt_changes_at_its_time_comes_back_and_no_answer_is_lost_or_overtaken():
    with Network(topology({"at_s": 1, "do": "rtt", "pair": ["a", "b"], "rtt_ms": 60, "for_s": 1})) as network:
        pings = Pings(network, "a-0", "b-0", seconds=3)
        conductor = play(network, 3.2)
        answers = pings.answers(conductor.zero)
    all_in_effect(conductor)
    assert [n for _, n, _ in answers] == list(range(1, len(answers) + 1))
    assert len(answers) == 150
    for start, end, rtt in ((0.1, 0.9, 20), (1.1, 1.9, 60), (2.1, 2.9, 20)):
        assert statistics.median(between(answers, start, end)) == pytest.approx(rtt, abs=1)
    assert network.now.rtt_ms("a", "b") == 20


SENDER = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
began = time.monotonic()
for n in range(6000):
    s.sendto(n.to_bytes(4, 'big') + bytes(400), (sys.argv[1], 7000))
    while time.monotonic() < began + n * 0.0005:
        pass
"""
RECEIVER = """
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)
s.bind(('', 7000)); s.settimeout(2.0)
print('bound', flush=True)
got = []
try:
    while True:
        got.append(int.from_bytes(s.recv(1000)[:4], 'big'))
except TimeoutError:
    print(len(got), got == sorted(got), flush=True)
"""


def test_changing_a_delay_under_traffic_loses_no_packet_and_never_reorders():
    changes = [
        {"at_s": 0.3 * (n + 1), "do": "rtt", "pair": ["a", "b"], "rtt_ms": rtt}
        for n, rtt in enumerate((100, 4, 160, 40, 0, 300, 20))
    ]
    with Network(topology(*changes, delay="nfqueue")) as network:
        receiver = network.nodes["b-0"].start_root(
            ["chrt", "-f", "30", sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True
        )
        assert receiver.stdout.readline() == "bound\n"
        # on one processor, since the kernel itself may reorder what a process sends while it moves to another
        processor = str(min(os.sched_getaffinity(0)))
        sender = network.nodes["a-0"].start_root(
            ["taskset", "-c", processor, sys.executable, "-c", SENDER, network.plan.node_address["b-0"]]
        )
        conductor = play(network, 3.0)
        assert sender.wait(timeout=20) == 0
        said, _ = receiver.communicate(timeout=20)
        stats = network.delay_stats()
    all_in_effect(conductor)
    assert said == "6000 True\n"
    assert stats["drops"] == 0
    assert max(one.settles_s for one in conductor.happened) > 0.03  # 160 to 40 ms: 60 ms under way


def test_a_change_of_which_nothing_is_shown_is_done_when_it_returns():
    with Network(topology()) as network:
        tc = OpenTc(network.nodes["a-router"])
        for limit in range(200_000, 200_020):
            assert tc.change([f"qdisc change dev up parent 1:10 handle 10: bfifo limit {limit}"], []) == []
            (shown,) = tc.change([], ["qdisc show dev up"])
            assert f"limit {limit}b" in network.nodes["a-router"].run(["tc", "qdisc", "show", "dev", "up"])
            assert f"limit {limit}b" in shown
        tc.close()


def flood(network: Network, rate_mbps: float, seconds: float):
    """UDP from a to b; nobody listens, for the links are what is measured."""
    script = f"""
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect(('{network.plan.node_address["b-0"]}', 9))
gap, due, end = 1490 * 8 / {rate_mbps}e6, time.monotonic(), time.monotonic() + {seconds}
while due < end:
    try:
        s.send(bytes(1448))
    except OSError:
        pass
    due += gap
    while (left := due - time.monotonic()) > 0:
        time.sleep(left)
"""
    return network.nodes["a-0"].start_root([sys.executable, "-c", script])


def rates(
    network: Network, conductor: Conductor, moments: list[tuple[float, float]], link: str
) -> list[float]:
    """Mbit/s of layer 2 that left a link in each interval of time."""
    found = []
    with Counters(network) as counters:
        for start, end in moments:
            time.sleep(max(0.0, conductor.zero + start - time.monotonic()))
            first = counters.read()[link]
            time.sleep(max(0.0, conductor.zero + end - time.monotonic()))
            last = counters.read()[link]
            found.append((last.tx_bytes - first.tx_bytes) * 8e-6 / (last.t - first.t))
    return found


def started(conductor: Conductor):
    deadline = time.monotonic() + 5
    while conductor.zero is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert conductor.zero is not None


def test_a_rate_changes_at_its_time_and_comes_back():
    event = {"at_s": 1, "do": "rate", "link": "a/up", "rate_mbps": 20, "for_s": 1}
    with Network(topology(event)) as network:
        sender = flood(network, 60, 3.2)
        with Conductor(network, network.topology.events) as conductor:
            started(conductor)
            found = rates(network, conductor, [(0.4, 0.95), (1.2, 1.9), (2.4, 2.9)], "a/up")
        sender.wait(timeout=20)
    all_in_effect(conductor)
    assert found[1] == pytest.approx(20, rel=0.03)
    assert found[0] > 40
    assert found[2] > 40


def test_a_bandwidth_trace_is_followed(tmp_path: Path):
    trace = tmp_path / "trace.csv"
    trace.write_text("t_s, rate_mbps\n0, 20\n0.5, 5\n1.0, 30\n1.5, 10\n")
    event = {"at_s": 0.5, "do": "trace", "link": "a/up", "file": str(trace), "loop": True}
    wanted = [20, 5, 30, 10, 20, 5]
    with Network(topology(event)) as network:
        sender = flood(network, 60, 4.0)
        with Conductor(network, network.topology.events) as conductor:
            started(conductor)
            moments = [(0.5 + 0.5 * k + 0.1, 0.5 + 0.5 * k + 0.47) for k in range(len(wanted))]
            found = rates(network, conductor, moments, "a/up")
        sender.wait(timeout=20)
    all_in_effect(conductor)
    assert found == pytest.approx(wanted, rel=0.05)


def test_a_partition_cuts_only_what_it_names_and_heals_without_a_reset():
    stream = """
import socket, sys, time
if sys.argv[1] == 'listen':
    server = socket.create_server(('', 7001)); print('bound', flush=True)
    peer, _ = server.accept()
    got = b''
    while data := peer.recv(1000): got += data
    print(len(got), flush=True)
else:
    s = socket.create_connection((sys.argv[1], 7001))
    for _ in range(30): s.sendall(b'x'); time.sleep(0.1)
"""
    event = {"at_s": 1, "do": "partition", "sites": ["a"], "for_s": 0.8}
    with Network(topology(event, sites="abc")) as network:
        listener = network.nodes["b-0"].start_root(
            [sys.executable, "-c", stream, "listen"], stdout=subprocess.PIPE, text=True
        )
        assert listener.stdout.readline() == "bound\n"
        talker = network.nodes["a-0"].start_root(
            [sys.executable, "-c", stream, network.plan.node_address["b-0"]]
        )
        cut, kept = Pings(network, "a-0", "b-0", 3), Pings(network, "b-0", "c-0", 3)
        conductor = play(network, 3.3)
        cut, kept = cut.answers(conductor.zero), kept.answers(conductor.zero)
        assert talker.wait(timeout=10) == 0
        said, _ = listener.communicate(timeout=10)
        rules = network.nodes[CORE].run(["iptables", "-t", "mangle", "-S", "FORWARD"])
    all_in_effect(conductor)
    assert "DROP" not in rules
    assert said == "30\n"
    assert len(kept) == 150
    assert between(cut, 1.1, 1.75) == []
    assert len(between(cut, 0.1, 0.9)) >= 38
    assert len(between(cut, 1.95, 2.9)) >= 45


def test_a_flapping_link_is_down_in_the_first_part_of_every_period():
    event = {"at_s": 0.5, "do": "flap", "link": "b/down", "period_s": 0.8, "down_s": 0.3, "for_s": 2.4}
    with Network(topology(event)) as network:
        pings = Pings(network, "a-0", "b-0", seconds=3.4)
        conductor = play(network, 3.5)
        answers = pings.answers(conductor.zero)
    all_in_effect(conductor)
    assert [one.what.split()[-1] for one in conductor.happened] == ["down", "again"] * 3
    for k in range(3):
        down = 0.5 + 0.8 * k
        assert between(answers, down + 0.1, down + 0.27) == []
        assert len(between(answers, down + 0.4, down + 0.75)) >= 15


def test_what_is_still_down_after_a_run_must_be_silent_and_the_rest_as_it_should_then_be():
    events = [
        {"at_s": 0, "do": "down", "site": "c"},
        {"at_s": 0, "do": "rtt", "pair": ["a", "b"], "rtt_ms": 30},
        {"at_s": 0, "do": "rate", "link": "b/up", "rate_mbps": 50},
    ]
    with Network(topology(*events, sites="abc")) as network:
        conductor = play(network, 0.5)
        result = probe(network)
        network.nodes[CORE].run(["iptables", "-t", "mangle", "-F", "FORWARD"])
        network.nodes[CORE].run(["iptables", "-t", "mangle", "-P", "FORWARD", "ACCEPT"])
        leaking = [p for p in probe(network).problems if "c" in p.split(":")[0]]
    all_in_effect(conductor)
    assert result.problems == []
    figures = {(p.source, p.target): p for p in result.pairs}
    assert figures["a", "b"].rtt_wanted_ms == 30
    assert figures["b", "a"].rate_wanted_mbps == 50
    assert figures["a", "c"].answers == figures["c", "b"].answers == 0
    assert any("is down by an event, yet 5 pings were answered" in p for p in leaking)


TICK = "while :; do date +%s.%N; sleep 0.02; done"


def ticking(network: Network, tmp_path: Path) -> Programs:
    def start(node: str) -> Program:
        log = tmp_path / f"{node}.log"
        with log.open("ab") as output:
            process = network.nodes[node].start_program(
                ["sh", "-c", TICK], network.user, {}, output, Path("/")
            )
        return Program(node, process, log)

    return Programs([start(node) for node in network.plan.node_address], start)


def ticks(path: Path, zero: float) -> list[float]:
    offset = time.time() - time.monotonic() + zero
    return [float(line) - offset for line in path.read_text().splitlines()]


def test_nodes_are_frozen_thawed_killed_and_started_again(tmp_path):
    events = [
        {"at_s": 0.5, "do": "freeze", "node": "a-0", "for_s": 0.5},
        {"at_s": 1.4, "do": "kill", "node": "a-0"},
        {"at_s": 2.0, "do": "restart", "node": "a-0"},
    ]
    with Network(topology(*events)) as network:
        programs = ticking(network, tmp_path)
        conductor = play(network, 2.8, programs)
        all_in_effect(conductor)
        assert programs.all[0].process.poll() is None
    moved, stood = (ticks(tmp_path / f"{node}.log", conductor.zero) for node in ("a-0", "b-0"))
    for start, end in ((0.55, 0.95), (1.45, 1.98)):
        assert [t for t in moved if start < t < end] == []
        assert len([t for t in stood if start < t < end]) >= 10
    for start, end in ((1.05, 1.35), (2.3, 2.8)):
        assert len([t for t in moved if start < t < end]) >= 5


def test_a_death_that_was_asked_for_is_named_and_ends_nothing_by_itself(tmp_path):
    kill = {"at_s": 0.3, "do": "kill", "node": "b-0"}
    with Network(topology(kill)) as network:
        for survivor, message in (
            ("sleep 1", None),
            (
                "sleep 1; exit 3",
                r"node b-0: killed by event 1 \(at 0.3 s: kill b-0\); without it node a-0 exited",
            ),
        ):
            processes = {
                node: network.nodes[node].start_program(
                    ["sh", "-c", script], network.user, {}, subprocess.DEVNULL, Path("/")
                )
                for node, script in (("a-0", survivor), ("b-0", "sleep 60"))
            }
            running = [Program(node, process, tmp_path / node) for node, process in processes.items()]
            with Conductor(network, network.topology.events, Programs(running)) as conductor:
                if message is None:
                    statuses = wait_for_all(running, limit_s=10)
                    assert (statuses["a-0"], statuses["b-0"] != 0) == (0, True)
                else:
                    with pytest.raises(ProgramFailed, match=message):
                        wait_for_all(running, limit_s=10)
            all_in_effect(conductor)


def test_a_frozen_node_is_not_held_to_progress_while_its_thaw_is_to_come(tmp_path):
    freeze = {"at_s": 0.2, "do": "freeze", "node": "b-0", "for_s": 2.5}
    with Network(topology(freeze)) as network:
        processes = [
            network.nodes[node].start_program(
                ["sh", "-c", script], network.user, {}, subprocess.DEVNULL, Path("/")
            )
            for node, script in (("a-0", "sleep 3"), ("b-0", "sleep 1"))
        ]
        running = [Program(n, p, tmp_path / n) for n, p in zip(("a-0", "b-0"), processes, strict=True)]
        with Conductor(network, network.topology.events, Programs(running)) as conductor:
            wait_for_all(running, stall_s=1.5, disturbed=conductor.disturbed, patient=conductor.will_pass)
        all_in_effect(conductor)


def test_an_event_that_cannot_be_applied_is_a_problem_that_names_it():
    events = [{"at_s": 0.2, "do": "rtt", "pair": ["a", "b"], "rtt_ms": 50}]
    events.append({"at_s": 0.3, "do": "rate", "link": "a/up", "rate_mbps": 10})
    events.append({"at_s": 100, "do": "kill", "node": "a-0"})
    with Network(topology(*events, delay="nfqueue")) as network:
        network.delay_line.send_signal(signal.SIGKILL)
        network.delay_line.wait(timeout=5)
        network.nodes["a-router"].run(["tc", "qdisc", "del", "dev", "up", "root"])
        conductor = play(network, 1.0)
    first, second = conductor.problems()
    assert first.startswith("event 1 (RTT a – b: 50 ms): the delay line does not answer")
    assert second.startswith("event 2 (rate of a/up: 10 Mbit/s): a-router: tc: ")
    assert conductor.not_reached() == ["event 3 (at 100 s: kill a-0)"]
