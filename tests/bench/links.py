"""Rate, RTT and lateness of emulated links; the rival is Mininet's own TCLink with the same figures."""

import re
import statistics
import subprocess
import threading
import time

from mininet.link import TCLink
from mininet.log import setLogLevel
from mininet.net import Mininet
from rich.console import Console
from rich.table import Table

from testbed.errors import TestbedError
from testbed.measure import measure_goodput_mbps, measure_rtt_ms
from testbed.network import Network
from testbed.topology import Topology, topology_from
from testbed.units import goodput_mbps

RTTS_MS = (0, 10, 50, 100, 200)
REPEATS = 3


def two_sites(rtt_ms: float, rate_mbps: float = 1000) -> Topology:
    """Two sites of one node."""
    return topology_from(
        {
            "name": "bench",
            "sites": {"a": {"nodes": 1}, "b": {"nodes": 1}},
            "wan": {"uplink": {"rate_mbps": rate_mbps}, "pairs": [{"between": ["a", "b"], "rtt_ms": rtt_ms}]},
        },
        "bench",
    )


def rival(rtt_ms: float, rate_mbps: float = 1000) -> tuple[str, str]:
    """(goodput, RTT) that Mininet's TCLink gives when asked for the same; what it says where it fails."""
    setLogLevel("critical")
    Mininet.inited = True
    net = Mininet(topo=None, controller=None, build=False, link=TCLink)
    try:
        a, b = net.addHost("a", ip="10.0.0.1/24"), net.addHost("b", ip="10.0.0.2/24")
        net.addLink(a, b, bw=rate_mbps, delay=f"{rtt_ms / 2}ms")
        for node, address in ((a, "10.0.0.1/24"), (b, "10.0.0.2/24")):
            node.setIP(address)
            node.cmd(
                "sysctl -qw net.ipv4.tcp_rmem='4096 131072 64000000' net.ipv4.tcp_wmem='4096 16384 64000000'"
            )
        pings = re.findall(r"time=([\d.]+)", a.cmd("ping -n -c 5 -i 0.05 -w 5 10.0.0.2"))
        b.cmd("iperf3 -s -1 -D")
        time.sleep(0.3)
        told = re.findall(
            r"([\d.]+) ([GMK])bits/sec +receiver", a.cmd("timeout 15 iperf3 -O 2 -t 2 -c 10.0.0.2")
        )
        scale = {"G": 1e3, "M": 1.0, "K": 1e-3}
        goodput = f"{float(told[0][0]) * scale[told[0][1]]:.0f}" if told else "none"
        return goodput, f"{statistics.median(map(float, pings)):.2f}" if pings else "none"
    finally:
        for host in net.hosts:
            host.terminate()


def ring(sites: int = 8) -> tuple[list[float], dict[str, float] | None]:
    """Goodput of every neighbour pair of a ring, all at once, 1 Gbit/s and 30 ms each."""
    names = [f"s{i}" for i in range(sites)]
    pairs = [{"between": [a, b], "rtt_ms": 30} for i, a in enumerate(names) for b in names[i + 1 :]]
    topology = topology_from(
        {
            "name": "ring",
            "sites": {name: {"nodes": 1} for name in names},
            "wan": {"uplink": {"rate_mbps": 1000}, "pairs": pairs},
        },
        "ring",
    )
    results: dict[int, float] = {}
    with Network(topology) as network:

        def flow(i: int) -> None:
            results[i] = measure_goodput_mbps(
                network, f"s{i}-0", f"s{(i + 1) % sites}-0", seconds=3, omit=2, port=5300 + i
            )

        threads = [threading.Thread(target=flow, args=(i,)) for i in range(sites)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[i] for i in sorted(results)], network.delay_stats()


def lateness_under_load(load: int) -> dict[str, float] | None:
    """The delay line's statistics while one flow runs and ``load`` busy loops take the cores."""
    busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(load)]
    try:
        with Network(two_sites(30)) as network:
            measure_goodput_mbps(network, "a-0", "b-0", seconds=3, omit=1)
            time.sleep(0.6)
            return network.delay_stats()
    finally:
        for process in busy:
            process.kill()
            process.wait()


def run(console: Console) -> None:
    """Prints the tables."""
    table = Table(
        "asked: RTT ms", "RTT ms", "goodput Mbit/s", "of 956.4", "TCLink RTT ms", "TCLink Mbit/s", box=None
    )
    for rtt_ms in RTTS_MS:
        rtts, goodputs = [], []
        for _ in range(REPEATS):
            with Network(two_sites(rtt_ms)) as network:
                rtts.append(measure_rtt_ms(network, "a-0", "b-0"))
                goodputs.append(measure_goodput_mbps(network, "a-0", "b-0", seconds=2, omit=1 + rtt_ms // 50))
        goodput = statistics.median(goodputs)
        try:
            other_goodput, other_rtt = rival(rtt_ms)
        except Exception as error:
            other_goodput, other_rtt = f"failed: {error}", "-"
        table.add_row(
            str(rtt_ms),
            f"{statistics.median(rtts):.2f}",
            f"{goodput:.1f}",
            f"{100 * goodput / goodput_mbps(1000):.1f} %",
            other_rtt,
            other_goodput,
        )
    console.print(table)
    for load in (0, 2, 4):
        if stats := lateness_under_load(load):
            console.print(
                f"delay line, 1 flow, {load} busy loops: lateness p50 {stats['p50_ms']:.3f} ms,"
                f" p99 {stats['p99_ms']:.3f} ms, max {stats['max_ms']:.2f} ms"
            )
    try:
        goodputs, stats = ring()
        late = f"; lateness p99 {stats['p99_ms']:.3f} ms" if stats else ""
        console.print(
            f"ring of 8 at 1 Gbit/s, all at once: {min(goodputs):.0f} to {max(goodputs):.0f} Mbit/s{late}"
        )
    except TestbedError as error:
        console.print(f"ring of 8: {error}")
