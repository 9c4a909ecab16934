"""Measures the links that no measurement between sites fills: nodes' own uplinks, and downlinks wider than any uplink.

Between a node and the core there is no delay and no path's cap, so what arrives is what the links allow.
"""

from dataclasses import asdict, dataclass
from typing import Any

from testbed.events.darkness import node_is_dark
from testbed.measure import measure_goodput_mbps
from testbed.network import Network
from testbed.plan import CORE, NetworkPlan
from testbed.units import goodput_mbps

RATE_TOLERANCE_SHARE = 0.03
TRIES = 3
SLOW_MBPS = 100.0
"""Below this a second holds too few packets to tell 3 % from chance."""


@dataclass(frozen=True)
class Access:
    """One direction between a node and the core."""

    link: str  # the link that limits it: site/up, or north-0/wan-up for a node's own uplink
    node: str
    up: bool
    rate_mbps: float  # layer 2


@dataclass(frozen=True)
class AccessMeasured:
    """A link as asked for and as measured."""

    link: str
    node: str
    up: bool
    rate_wanted_mbps: float
    goodput_wanted_mbps: float
    goodput_mbps: float
    tries: int

    @property
    def problems(self) -> list[str]:
        """What is off, as sentences; empty when the link keeps its promise."""
        if abs(self.goodput_mbps / self.goodput_wanted_mbps - 1) <= RATE_TOLERANCE_SHARE:
            return []
        return [
            f"link {self.link}: {self.goodput_mbps:.1f} Mbit/s of payload,"
            f" allowed {self.goodput_wanted_mbps:.1f} ± {100 * RATE_TOLERANCE_SHARE:g} %"
        ]

    def row(self) -> dict[str, Any]:
        """As plain data for the record."""
        return {**asdict(self), "ok": not self.problems}


def accesses(plan: NetworkPlan) -> list[Access]:
    """What pairs of sites leave unmeasured. Pure.

    A site's uplink wider than the links of each of its nodes is read back, but cannot be filled by one flow.
    """
    found = []
    sites = plan.topology.sites
    for site in plan.uplinks:
        first = plan.topology.nodes_of(site)[0]
        others = [other for other in sites if other != site]
        for up, side in ((True, "up"), (False, "down")):
            shared = plan.link(f"{site}/{side}").rate_mbps
            filled = max(plan.wan_rate_mbps(*((site, o) if up else (o, site))) for o in others)
            for node in plan.topology.nodes_of(site):
                link = plan.link(node if up else f"{node}/down")
                if link.node_uplink is not None:
                    rate = min(link.rate_mbps, link.node_uplink.rate_mbps, shared)
                    found.append(Access(f"{node}/wan-{side}", node, up, rate))
                elif node == first and filled < shared <= link.rate_mbps:
                    found.append(Access(f"{site}/{side}", node, up, shared))
    return found


def _measure(network: Network, access: Access, tries: int) -> AccessMeasured:
    site = network.topology.nodes[access.node]
    ends = (access.node, CORE) if access.up else (CORE, access.node)
    address = network.plan.core_address(site) if access.up else network.plan.node_address[access.node]
    seconds = 1 if access.rate_mbps >= SLOW_MBPS else 3
    got = measure_goodput_mbps(network, *ends, seconds=seconds, address=address)
    wanted = goodput_mbps(access.rate_mbps, network.topology.mtu)
    return AccessMeasured(access.link, access.node, access.up, access.rate_mbps, wanted, got, tries)


def measure_accesses(network: Network) -> list[AccessMeasured]:
    """Measures each of them; what is off is measured again, and the last try counts."""
    measured = []
    for access in accesses(network.now):
        if node_is_dark(network.now, access.node):
            continue
        for number in range(1, TRIES + 1):
            result = _measure(network, access, number)
            if not result.problems:
                break
        measured.append(result)
    return measured
