"""Commands about topologies: nothing is built."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from experiments.command_line import TopologyArgument, out, warn
from experiments.errors import RequestError


def topology_list() -> None:
    """The shipped topologies. Example: dilocox topology list"""
    from testbed.topology import SHIPPED, load_topology  # noqa: PLC0415

    table = Table("name", "sites", "nodes", "description", box=None)
    for path in sorted(SHIPPED.glob("*.yaml")):
        topology = load_topology(path)
        table.add_row(topology.name, str(len(topology.sites)), str(len(topology.nodes)), topology.description)
    out.print(table)


def topology_show(topology: TopologyArgument) -> None:
    """Sites, nodes, addresses and links of a topology. Example: dilocox topology show two-sites-1gbps"""
    from testbed.events.kinds import describe  # noqa: PLC0415
    from testbed.plan import plan_network  # noqa: PLC0415
    from testbed.topology import load_topology  # noqa: PLC0415
    from testbed.units import goodput_mbps  # noqa: PLC0415

    loaded = load_topology(topology)
    plan = plan_network(loaded)
    out.print(f"{loaded.name}: {loaded.description}", soft_wrap=True)
    out.print(f"source: {loaded.source}", soft_wrap=True)
    nodes = Table("rank", "node", "site", "address", box=None)
    for rank, (node, site) in enumerate(loaded.nodes.items()):
        nodes.add_row(str(rank), node, site, plan.node_address[node])
    out.print(nodes)
    links = Table("link", "Mbit/s (layer 2)", "Mbit/s of TCP payload", "queue kB", box=None)
    for link in plan.links:
        goodput = goodput_mbps(link.rate_mbps, loaded.mtu)
        links.add_row(link.name, f"{link.rate_mbps:g}", f"{goodput:.1f}", f"{link.queue_bytes / 1e3:.0f}")
        if own := link.node_uplink:
            name = link.name.removesuffix("/down") + (
                "/wan-down" if link.name.endswith("/down") else "/wan-up"
            )
            goodput = goodput_mbps(own.rate_mbps, loaded.mtu)
            links.add_row(name, f"{own.rate_mbps:g}", f"{goodput:.1f}", f"{own.queue_bytes / 1e3:.0f}")
    out.print(links)
    for delay in plan.delays:
        text = f"{delay.source} to {delay.target}: {delay.delay_ms:g} ms one way, {2 * delay.delay_ms:g} ms round trip"
        if delay.cap_mbps is not None:
            text += f", at most {delay.cap_mbps:g} Mbit/s"
        if delay.own_class:
            text += f", queue {delay.queue_bytes / 1e3:.0f} kB"
        if delay.mtu is not None:
            text += f", MTU {delay.mtu} bytes"
        out.print(text, soft_wrap=True)
    for number, event in enumerate(loaded.events, start=1):
        out.print(f"event {number}, {describe(event)}", soft_wrap=True, markup=False)


def topology_check(topology: TopologyArgument) -> None:
    """Check a topology file without building anything. Example: dilocox topology check my-wan.yaml"""
    from testbed.plan import plan_network  # noqa: PLC0415
    from testbed.topology import load_topology  # noqa: PLC0415

    plan = plan_network(load_topology(topology))
    out.print(
        f"{plan.topology.name}: {len(plan.topology.sites)} sites, {len(plan.node_address)} nodes,"
        f" {len(plan.links)} shaped links, {len(plan.delays)} delays: correct"
    )
    warn(plan.topology)


def topology_plot(
    topology: TopologyArgument,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="PNG, PDF or SVG file")] = None,
) -> None:
    """Draw a topology: sites, links, figures. Example: dilocox topology plot two-sites-1gbps -o wan.png"""
    from experiments.topology_plot import draw  # noqa: PLC0415
    from testbed.topology import load_topology  # noqa: PLC0415

    loaded = load_topology(topology)
    path = output or Path(f"{loaded.name}.png")
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise RequestError(
            f"--output: found {path.name!r}, allowed is a name that ends in .png, .pdf or .svg"
        )
    draw(loaded).savefig(path, dpi=200)
    out.print(str(path), soft_wrap=True)
