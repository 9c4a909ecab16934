"""From a Topology to everything that will be made, as a value that a test can compare without root.

A routed star without any bridge: each node has a veth to its site's router, each router a veth to the WAN
core. Nodes, routers and the core are network namespaces, so nothing at all is made in the host's own.
Rates are shaped at the sending end of every link; delays act in the core, one class for every ordered pair of
sites, which (unlike delays per site) can express any matrix of round-trip times.
"""

from dataclasses import dataclass

from testbed.topology import Topology

CORE = "wan-core"
CONTROL_PORT = 29500
"""MASTER_PORT of every program: rendezvous traffic is told from data by this port."""
NODE_INTERFACE = "eth0"
LAN_QUEUE_BYTES = 4_000_000
MIN_QUEUE_BYTES = 64 * 1514


@dataclass(frozen=True)
class Link:
    """One direction of a link: the egress of ``interface`` in the namespace ``owner``."""

    name: str  # north/up, north/down, north-0 (out of the node), north-0/down (into it)
    owner: str
    interface: str
    rate_mbps: float
    queue_bytes: int
    counts_control: bool = False  # tells rendezvous traffic apart (site uplinks)


@dataclass(frozen=True)
class Veth:
    """A veth pair: (namespace, interface, address with prefix length) at both ends."""

    left: tuple[str, str, str]
    right: tuple[str, str, str]


@dataclass(frozen=True)
class DelayClass:
    """Packets from one site to another are held for ``delay_ms`` ± ``jitter_ms`` in the core; a share is lost."""

    source: str
    target: str
    delay_ms: float
    jitter_ms: float
    loss: float
    from_interface: str  # of the core
    to_interface: str  # of the core
    source_subnet: str
    link: str  # the core's egress link that these packets leave by
    rate_mbps: float  # of that link, for sizing queues
    queue_bytes: int


@dataclass(frozen=True)
class NetworkPlan:
    """All that a topology needs, whichever way delays are made."""

    topology: Topology
    node_address: dict[str, str]
    routers: dict[str, str]  # site -> router's namespace
    veths: tuple[Veth, ...]
    routes: tuple[tuple[str, str, str], ...]  # namespace, destination, via
    links: tuple[Link, ...]
    delays: tuple[DelayClass, ...]

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Every namespace: nodes in rank order, then routers, then the core (where there is a WAN)."""
        core = (CORE,) if self.delays else ()
        return (*self.node_address, *self.routers.values(), *core)

    @property
    def uplinks(self) -> dict[str, str]:
        """Site -> name of its uplink's egress: together they see every WAN packet exactly once."""
        return {site: f"{site}/up" for site in self.routers} if self.delays else {}

    def link(self, name: str) -> Link:
        """The link of that name."""
        return next(link for link in self.links if link.name == name)

    def site_of_address(self) -> dict[str, str]:
        """Node address -> site."""
        return {self.node_address[node]: site for node, site in self.topology.nodes.items()}


def queue_bytes(rate_mbps: float, rtt_ms: float, bdp: float) -> int:
    """Queue of a WAN link: ``bdp`` bandwidth-delay products, but never less than 64 full frames."""
    return max(MIN_QUEUE_BYTES, round(bdp * rate_mbps * 1e6 / 8 * rtt_ms / 1e3))


def plan_network(topology: Topology) -> NetworkPlan:
    """Lays out addresses, routes, links and delay classes. Pure: the same topology, the same plan."""
    address: dict[str, str] = {}
    routers = {site: f"{site}-router" for site in topology.sites}
    veths: list[Veth] = []
    routes: list[tuple[str, str, str]] = []
    links: list[Link] = []
    wan = topology.wan if len(topology.sites) > 1 else None
    longest_rtt_ms = max((pair.rtt_ms for pair in wan.pairs), default=0.0) if wan else 0.0

    for i, (site, spec) in enumerate(topology.sites.items(), start=1):
        router = routers[site]
        for k, node in enumerate(topology.nodes_of(site), start=1):
            address[node] = f"10.{i}.{k}.2"
            veths.append(
                Veth((node, NODE_INTERFACE, f"10.{i}.{k}.2/30"), (router, f"n{k}", f"10.{i}.{k}.1/30"))
            )
            routes.append((node, "default", f"10.{i}.{k}.1"))
            links.append(Link(node, node, NODE_INTERFACE, spec.lan.rate_mbps, LAN_QUEUE_BYTES))
            links.append(Link(f"{node}/down", router, f"n{k}", spec.lan.rate_mbps, LAN_QUEUE_BYTES))
        if wan is None:
            continue
        uplink = topology.uplink(site)
        veths.append(Veth((router, "up", f"172.31.{i}.2/30"), (CORE, f"s{i}", f"172.31.{i}.1/30")))
        routes.append((router, "default", f"172.31.{i}.1"))
        routes.append((CORE, f"10.{i}.0.0/16", f"172.31.{i}.2"))
        up_queue = queue_bytes(uplink.up, longest_rtt_ms, wan.queue_bdp)
        down_queue = queue_bytes(uplink.down, longest_rtt_ms, wan.queue_bdp)
        links.append(Link(f"{site}/up", router, "up", uplink.up, up_queue, counts_control=True))
        links.append(Link(f"{site}/down", CORE, f"s{i}", uplink.down, down_queue))

    plan_links = {link.name: link for link in links}
    delays = [
        DelayClass(
            source=source,
            target=target,
            delay_ms=topology.rtt_ms(source, target) / 2,
            jitter_ms=topology.pair(source, target).jitter_ms,
            loss=topology.pair(source, target).loss,
            from_interface=f"s{i}",
            to_interface=f"s{j}",
            source_subnet=f"10.{i}.0.0/16",
            link=f"{target}/down",
            rate_mbps=plan_links[f"{target}/down"].rate_mbps,
            queue_bytes=plan_links[f"{target}/down"].queue_bytes,
        )
        for i, source in enumerate(topology.sites, start=1)
        for j, target in enumerate(topology.sites, start=1)
        if wan is not None and source != target
    ]
    return NetworkPlan(topology, address, routers, tuple(veths), tuple(routes), tuple(links), tuple(delays))
