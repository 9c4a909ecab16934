"""How long networks take to come up and go down, beside Mininet building the same nodes without shaping."""

import statistics
import time
from pathlib import Path

from mininet.net import Mininet
from rich.console import Console
from rich.table import Table

from testbed.network import Network
from testbed.topology import topology_from

REPEATS = 3


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


def run(console: Console) -> None:
    """Prints the table."""
    table = Table("nodes", "up s", "down s", "delay line MB", "plain Mininet up s", "down s", box=None)
    for nodes in (4, 8, 64):
        ups, downs, memory = [], [], "-"
        for _ in range(REPEATS if nodes < 64 else 1):
            network = Network(sized(nodes))
            began = time.monotonic()
            network.__enter__()
            ups.append(time.monotonic() - began)
            if network.delay_line:
                status = Path(f"/proc/{network.delay_line.pid}/status").read_text(encoding="ascii")
                memory = f"{int(status.partition('VmRSS:')[2].split()[0]) / 1024:.0f}"
            began = time.monotonic()
            network.__exit__(None, None, None)
            downs.append(time.monotonic() - began)
        other_up, other_down = plain_mininet(nodes)
        table.add_row(
            str(nodes),
            f"{statistics.median(ups):.2f}",
            f"{statistics.median(downs):.2f}",
            memory,
            f"{other_up:.2f}",
            f"{other_down:.2f}",
        )
    console.print(table)
