"""How long networks take to come up and go down, beside Mininet building the same nodes without shaping."""

import statistics
import time
from pathlib import Path

from mininet.net import Mininet
from rich.console import Console
from verdicts import Verdicts

from testbed.network import Network
from testbed.topology import topology_from

REPEATS = 3
UP_S = {8: 2.0, 64: 15.0}
DOWN_S = 3.0
MEMORY_MB = 100.0


def sized(nodes: int):
    """A topology of so many nodes, two in a site."""
    names = [f"s{i}" for i in range(nodes // 2)]
    pairs = [{"between": [a, b], "rtt_ms": 30} for i, a in enumerate(names) for b in names[i + 1 :]]
    sites = {name: {"nodes": 2} for name in names}
    return topology_from(
        {"name": "n", "sites": sites, "wan": {"uplink": {"rate_mbps": 1000}, "pairs": pairs}}, "n"
    )


def plain_mininet(nodes: int) -> tuple[float, float]:
    """(up, down) in seconds of as many Mininet hosts with one veth each, no router, no shaping, no delay."""
    Mininet.inited = True
    began = time.monotonic()
    net = Mininet(topo=None, controller=None, build=False)
    hub = net.addHost("hub", ip=None)
    for i in range(nodes):
        net.addLink(net.addHost(f"h{i}", ip=None), hub)
    up = time.monotonic() - began
    began = time.monotonic()
    for host in net.hosts:
        host.terminate()
    return up, time.monotonic() - began


def ours(nodes: int) -> tuple[float, float, float]:
    """Medians of (up s, down s, resident MB of the delay line or 0)."""
    ups, downs, memory = [], [], 0.0
    for _ in range(REPEATS if nodes < 64 else 1):
        network = Network(sized(nodes))
        began = time.monotonic()
        network.__enter__()
        ups.append(time.monotonic() - began)
        if network.delay_line:
            status = Path(f"/proc/{network.delay_line.pid}/status").read_text(encoding="ascii")
            memory = int(status.partition("VmRSS:")[2].split()[0]) / 1024
        began = time.monotonic()
        network.__exit__(None, None, None)
        downs.append(time.monotonic() - began)
    return statistics.median(ups), statistics.median(downs), memory


def run(console: Console) -> None:
    """Prints the table."""
    verdicts = Verdicts()
    for nodes, up_target_s in UP_S.items():
        up, down, memory = ours(nodes)
        other_up, other_down = plain_mininet(nodes)
        verdicts.at_most(f"{nodes} nodes up", up_target_s, up, "s", f"{other_up:.2f} s")
        verdicts.at_most(f"{nodes} nodes down", DOWN_S, down, "s", f"{other_down:.2f} s")
        verdicts.at_most(f"delay line of {nodes} nodes", MEMORY_MB, memory, "MB", "none")
    verdicts.show(console, "Mininet, unshaped")
