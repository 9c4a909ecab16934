"""From a Topology to everything that will be made, as a value that a test can compare without root.

A routed star without any bridge: each node has a veth to its site's router, each router a veth to the WAN
core. Nodes, routers and the core are network namespaces, so nothing at all is made in the host's own.
Rates are shaped at the sending end of every link; delays act in the core, one class for every ordered pair of
sites, which (unlike delays per site) can express any matrix of round-trip times.
"""

from dataclasses import dataclass

from testbed.events.checks import highest_event_rate_mbps, longest_event_rtt_ms
from testbed.linkmodel import DEFAULT_QUEUE_BDP, Pair, Queued
from testbed.topology import Topology

CORE = "wan-core"
CONTROL_PORT = 29500
"""MASTER_PORT of every program: rendezvous traffic is told from data by this port."""
NODE_INTERFACE = "eth0"
LAN_QUEUE_BYTES = 4_000_000
MIN_QUEUE_BYTES = 64 * 1514
SUPER_PACKETS_PER_QUEUE = 64 * 1514
"""A shorter queue would not take one super-packet of 64 kB in, so there segments must travel one by one."""


@dataclass(frozen=True)
class NodeUplink:
    """A node's own rate to or from the WAN, beneath its link to the site's router; traffic inside the site is exempt."""

    rate_mbps: float
    queue_bytes: int
    site_subnet: str
    side: str  # which address tells the site's own traffic: dst out of a node, src into it


@dataclass(frozen=True)
class Link:
    """One direction of a link: the egress of ``interface`` in the namespace ``owner``."""

    name: str  # north/up, north/down, north-0 (out of the node), north-0/down (into it)
    owner: str
    interface: str
    rate_mbps: float
    queue_bytes: int
    counts_control: bool = False  # tells rendezvous traffic apart (site uplinks)
    reserved_share: float = 0.0  # of the rate, that the classes of single paths on this link are sure of
    node_uplink: NodeUplink | None = None


@dataclass(frozen=True)
class Veth:
    """A veth pair: (namespace, interface, address with prefix length) at both ends."""

    left: tuple[str, str, str]
    right: tuple[str, str, str]


@dataclass(frozen=True)
class DelayClass:
    """Packets from one site to another are held for ``delay_ms`` ± ``jitter_ms`` in the core; a share is lost.

    With ``own_class`` the path has an htb class and a queue of its own on the core's egress, beneath the downlink of
    the target: at most ``ceil_mbps``, sure of ``sure_mbps``.
    """

    source: str
    target: str
    delay_ms: float
    jitter_ms: float
    loss: float
    from_interface: str  # of the core
    to_interface: str  # of the core
    source_subnet: str
    link: str  # the core's egress link that these packets leave by
    rate_mbps: float  # of that link
    queue_bytes: int
    sharers: int = 1  # paths that leave by that link
    own_class: bool = False
    cap_mbps: float | None = None  # of this path
    mtu: int | None = None  # of this path, where it is not that of the devices

    @property
    def ceil_mbps(self) -> float:
        """The most that this path can carry beneath the link."""
        return self.rate_mbps if self.cap_mbps is None else min(self.rate_mbps, self.cap_mbps)

    @property
    def sure_mbps(self) -> float:
        """What this path gets however busy the link is."""
        return min(self.ceil_mbps, self.rate_mbps / self.sharers)


@dataclass(frozen=True)
class Cut:
    """Packets that a router would forward between these interfaces (None: any) are lost without a word."""

    owner: str
    from_interface: str | None
    to_interface: str | None


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
    cuts: frozenset[Cut] = frozenset()  # none in a new network; events cut

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

    @property
    def single_segments(self) -> bool:
        """Whether offloads must be off: a loss or a short queue would hit 45 segments of a super-packet at once."""
        queues = [link.queue_bytes for link in self.links] + [d.queue_bytes for d in self.delays]
        queues += [link.node_uplink.queue_bytes for link in self.links if link.node_uplink]
        follows_a_trace = any(event.do == "trace" for event in self.topology.events)
        return self.topology.loses or follows_a_trace or min(queues) < SUPER_PACKETS_PER_QUEUE

    def path(self, source: str, target: str) -> DelayClass:
        """The path from one site to another."""
        return next(d for d in self.delays if (d.source, d.target) == (source, target))

    def rate_mbps(self, source: str, target: str) -> float:
        """The most that one flow can get from one node to another, in Mbit/s at layer 2."""
        out, into = self.link(source), self.link(f"{target}/down")
        rates = [out.rate_mbps, into.rate_mbps]
        here, there = self.topology.nodes[source], self.topology.nodes[target]
        if here != there:
            rates += [self.link(f"{here}/up").rate_mbps, self.link(f"{there}/down").rate_mbps]
            rates += [end.node_uplink.rate_mbps for end in (out, into) if end.node_uplink]
            rates.append(self.path(here, there).ceil_mbps)
        return min(rates)

    def wan_rate_mbps(self, source: str, target: str) -> float:
        """The most that one flow between the first nodes of two sites can get, in Mbit/s at layer 2."""
        return self.rate_mbps(self.topology.nodes_of(source)[0], self.topology.nodes_of(target)[0])

    def mtu(self, source: str, target: str) -> int:
        """The largest IP packet from one site to another, in bytes."""
        own = self.path(source, target).mtu if source != target else None
        return own or self.topology.mtu

    def core_address(self, site: str) -> str:
        """The core's address on its link to a site."""
        veth = next(v for v in self.veths if v.left[0] == self.routers[site] and v.right[0] == CORE)
        return veth.right[2].split("/")[0]

    def rtt_ms(self, one: str, other: str) -> float:
        """Round-trip time between two sites, in ms."""
        return sum(d.delay_ms for d in self.delays if {d.source, d.target} == {one, other})

    def site_of_address(self) -> dict[str, str]:
        """Node address -> site."""
        return {self.node_address[node]: site for node, site in self.topology.nodes.items()}


def queue_bytes(rate_mbps: float, rtt_ms: float, *rules: Queued) -> int:
    """Length of a queue by the first rule that says one; bandwidth-delay products never give less than 64 full frames."""
    for rule in rules:
        if rule.queue_bytes is not None:
            return rule.queue_bytes
        if rule.queue_bdp is not None:
            return _bdp_bytes(rate_mbps, rtt_ms, rule.queue_bdp)
    return _bdp_bytes(rate_mbps, rtt_ms, DEFAULT_QUEUE_BDP)


def _bdp_bytes(rate_mbps: float, rtt_ms: float, bdp: float) -> int:
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
    longest_rtt_ms = max(longest_rtt_ms, longest_event_rtt_ms(topology.events))

    for i, (site, spec) in enumerate(topology.sites.items(), start=1):
        router = routers[site]
        for k, node in enumerate(topology.nodes_of(site), start=1):
            address[node] = f"10.{i}.{k}.2"
            veths.append(
                Veth((node, NODE_INTERFACE, f"10.{i}.{k}.2/30"), (router, f"n{k}", f"10.{i}.{k}.1/30"))
            )
            routes.append((node, "default", f"10.{i}.{k}.1"))
            own = topology.node_uplink(node) if wan else None
            out = into = None
            if wan and own:
                subnet = f"10.{i}.0.0/16"
                out = NodeUplink(own.up, queue_bytes(own.up, longest_rtt_ms, wan), subnet, "dst")
                into = NodeUplink(own.down, queue_bytes(own.down, longest_rtt_ms, wan), subnet, "src")
            links.append(Link(node, node, NODE_INTERFACE, spec.lan.up, LAN_QUEUE_BYTES, node_uplink=out))
            links.append(
                Link(f"{node}/down", router, f"n{k}", spec.lan.down, LAN_QUEUE_BYTES, node_uplink=into)
            )
        if wan is None:
            continue
        uplink = topology.uplink(site)
        veths.append(Veth((router, "up", f"172.31.{i}.2/30"), (CORE, f"s{i}", f"172.31.{i}.1/30")))
        routes.append((router, "default", f"172.31.{i}.1"))
        routes.append((CORE, f"10.{i}.0.0/16", f"172.31.{i}.2"))
        up_rate = max(uplink.up, highest_event_rate_mbps(topology.events, f"{site}/up"))
        down_rate = max(uplink.down, highest_event_rate_mbps(topology.events, f"{site}/down"))
        up_queue = queue_bytes(up_rate, longest_rtt_ms, wan)
        down_queue = queue_bytes(down_rate, longest_rtt_ms, wan)
        others = [other for other in topology.sites if other != site]
        own_share = sum(_has_own_class(topology.pair(site, other)) for other in others) / len(others)
        links.append(Link(f"{site}/up", router, "up", uplink.up, up_queue, counts_control=True))
        links.append(Link(f"{site}/down", CORE, f"s{i}", uplink.down, down_queue, reserved_share=own_share))

    plan_links = {link.name: link for link in links}
    delays = [
        _path(topology, plan_links[f"{target}/down"], (i, source), (j, target))
        for i, source in enumerate(topology.sites, start=1)
        for j, target in enumerate(topology.sites, start=1)
        if wan is not None and source != target
    ]
    return NetworkPlan(topology, address, routers, tuple(veths), tuple(routes), tuple(links), tuple(delays))


def _has_own_class(pair: Pair) -> bool:
    return pair.rate_mbps is not None or pair.queue_bdp is not None or pair.queue_bytes is not None


def _path(topology: Topology, link: Link, here: tuple[int, str], there: tuple[int, str]) -> DelayClass:
    """One direction between two sites; ``link`` is the target's downlink, sites come with their numbers."""
    pair = topology.pair(here[1], there[1])
    own_class = _has_own_class(pair)
    queue = link.queue_bytes
    if own_class and topology.wan:
        rate_mbps = min(link.rate_mbps, pair.rate_mbps or link.rate_mbps)
        queue = queue_bytes(rate_mbps, pair.rtt_ms, pair, topology.wan)
    return DelayClass(
        source=here[1],
        target=there[1],
        delay_ms=pair.rtt_ms / 2,
        jitter_ms=pair.jitter_ms,
        loss=pair.loss,
        from_interface=f"s{here[0]}",
        to_interface=f"s{there[0]}",
        source_subnet=f"10.{here[0]}.0.0/16",
        link=link.name,
        rate_mbps=link.rate_mbps,
        queue_bytes=queue,
        sharers=len(topology.sites) - 1,
        own_class=own_class,
        cap_mbps=pair.rate_mbps,
        mtu=pair.mtu,
    )
