"""Rate, RTT and lateness of emulated links; the rival is Mininet's own TCLink with the same figures."""

import logging
import re
import statistics
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mininet.link import TCLink
from mininet.log import lg
from mininet.net import Mininet
from rich.console import Console
from verdicts import Verdicts

from testbed.lateness import between, quantile_ms
from testbed.measure import measure_goodput_mbps, measure_rtt_ms
from testbed.network import Network
from testbed.topology import Topology, topology_from
from testbed.units import goodput_mbps

RATE_MBPS = 1000.0
SHARES = {0: 0.99, 30: 0.99, 100: 0.99, 200: 0.95}
"""RTT in ms -> the share of what a gigabit can carry that one TCP flow must reach."""
RTT_ERROR_MS = 0.5
LATENESS_P99_MS = {0: 0.25, 2: 1.0}
"""Busy loops beside the flow -> how late the delay line may be."""
RING_SITES = 8
RING_MBPS = 800.0
RING_S = 5
REPEATS = 3


def two_sites(rtt_ms: float, rate_mbps: float = RATE_MBPS) -> Topology:
    """Two sites of one node."""
    return topology_from(
        {
            "name": "bench",
            "sites": {"a": {"nodes": 1}, "b": {"nodes": 1}},
            "wan": {"uplink": {"rate_mbps": rate_mbps}, "pairs": [{"between": ["a", "b"], "rtt_ms": rtt_ms}]},
        },
        "bench",
    )


@contextmanager
def what_mininet_says() -> Iterator[list[str]]:
    """Mininet's messages as lines, instead of on the terminal."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handlers, level = lg.handlers[:], lg.level
    lg.handlers[:], lg.level = [Listener()], logging.ERROR
    try:
        yield said
    finally:
        lg.handlers[:], lg.level = handlers, level


def rival(rtt_ms: float) -> tuple[float, float, set[str]]:
    """(goodput Mbit/s, RTT ms, its complaints) of Mininet's TCLink when asked for the same."""
    Mininet.inited = True
    net = Mininet(topo=None, controller=None, build=False, link=TCLink)
    with what_mininet_says() as said:
        try:
            a, b = net.addHost("a", ip="10.0.0.1/24"), net.addHost("b", ip="10.0.0.2/24")
            net.addLink(a, b, bw=RATE_MBPS, delay=f"{rtt_ms / 2}ms", max_queue_size=20_000)
            buffers = (
                "sysctl -qw net.ipv4.tcp_rmem='4096 131072 64000000' net.ipv4.tcp_wmem='4096 16384 64000000'"
            )
            for node, address in ((a, "10.0.0.1/24"), (b, "10.0.0.2/24")):
                node.setIP(address)
                node.cmd(buffers)
            pings = re.findall(r"time=([\d.]+)", a.cmd("ping -n -c 5 -i 0.05 -w 5 10.0.0.2"))
            b.cmd("iperf3 -s -1 -D")
            send = "for try in 1 2 3 4 5; do timeout 15 iperf3 -f m -O 2 -t 2 -c 10.0.0.2 && break; sleep 0.2; done"
            told = re.findall(r"([\d.]+) Mbits/sec +receiver", a.cmd(send))
        finally:
            for host in net.hosts:
                host.terminate()
    lines = {line.strip() for text in said for line in text.splitlines()}
    return (
        float(told[0]) if told else 0.0,
        statistics.median(map(float, pings)) if pings else float("nan"),
        {line for line in lines if "rror" in line or "unknown" in line},
    )


def ring() -> tuple[list[float], dict[str, float]]:
    """Goodput of every neighbour pair of a ring, all at once, 1 Gbit/s and 30 ms each; lateness meanwhile."""
    names = [f"s{i}" for i in range(RING_SITES)]
    pairs = [{"between": [a, b], "rtt_ms": 30} for i, a in enumerate(names) for b in names[i + 1 :]]
    topology = topology_from(
        {
            "name": "ring",
            "sites": {name: {"nodes": 1} for name in names},
            "wan": {"uplink": {"rate_mbps": RATE_MBPS}, "pairs": pairs},
        },
        "ring",
    )
    results: dict[int, float] = {}
    with Network(topology) as network:

        def flow(i: int) -> None:
            # at real-time priority sixteen iperf3s would keep the kernel's own network threads from running
            results[i] = measure_goodput_mbps(
                network,
                f"s{i}-0",
                f"s{(i + 1) % RING_SITES}-0",
                seconds=RING_S,
                omit=2,
                port=5300 + i,
                realtime=False,
            )

        before = network.delay_stats(fresh=True)
        threads = [threading.Thread(target=flow, args=(i,)) for i in range(RING_SITES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        late = lateness(before, network.delay_stats(fresh=True))
    return [results[i] for i in sorted(results)], late


def lateness(before: dict | None, after: dict | None) -> dict[str, float]:
    """Quantiles in ms of what the delay line released in between; empty where netem delays."""
    if before is None or after is None:
        return {}
    counts = between(before["histogram"], after["histogram"])
    return {name: quantile_ms(counts, q) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


def lateness_under_load(load: int) -> dict[str, float]:
    """The delay line's lateness while one flow runs and ``load`` busy loops take the cores."""
    busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(load)]
    try:
        with Network(two_sites(30)) as network:
            before = network.delay_stats(fresh=True)
            measure_goodput_mbps(network, "a-0", "b-0", seconds=3, omit=1)
            return lateness(before, network.delay_stats(fresh=True))
    finally:
        for process in busy:
            process.kill()
            process.wait()


def single_flow(rtt_ms: int) -> tuple[float, float]:
    """Medians of (goodput Mbit/s, RTT ms)."""
    rtts, goodputs = [], []
    for _ in range(REPEATS):
        with Network(two_sites(rtt_ms)) as network:
            rtts.append(measure_rtt_ms(network, "a-0", "b-0"))
            goodputs.append(measure_goodput_mbps(network, "a-0", "b-0", seconds=2, omit=1 + rtt_ms // 50))
    return statistics.median(goodputs), statistics.median(rtts)


def run(console: Console) -> None:
    """Prints the tables."""
    verdicts = Verdicts()
    possible = goodput_mbps(RATE_MBPS)
    complaints: set[str] = set()
    for rtt_ms, share in SHARES.items():
        goodput, rtt = single_flow(rtt_ms)
        other_goodput, other_rtt, said = rival(rtt_ms)
        complaints |= said
        name = f"one flow, 1 Gbit/s, {rtt_ms} ms"
        verdicts.at_least(name, share * possible, goodput, "Mbit/s", f"{other_goodput:.0f} Mbit/s")
        # without a delay the path's own 0.1 to 0.4 ms stands
        verdicts.at_most(
            f"RTT error at {rtt_ms} ms",
            RTT_ERROR_MS,
            abs(rtt - rtt_ms),
            "ms",
            f"{abs(other_rtt - rtt_ms):.4g} ms",
        )
    for load, limit_ms in LATENESS_P99_MS.items():
        if late := lateness_under_load(load):
            verdicts.at_most(f"lateness p99, 1 flow, {load} busy loops", limit_ms, late["p99"], "ms")
    goodputs, late = ring()
    verdicts.at_least(f"ring of {RING_SITES}, all at once, slowest", RING_MBPS, min(goodputs), "Mbit/s")
    verdicts.show(console, "Mininet TCLink")
    together = " ".join(f"{goodput:.0f}" for goodput in goodputs)
    console.print(f"ring: {together} Mbit/s" + "".join(f", lateness {k} {v:.3f} ms" for k, v in late.items()))
    for line in sorted(complaints):
        console.print(f"TCLink said, and went on: {line}")
