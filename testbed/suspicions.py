"""Figures of a topology that can be built but were probably not meant so, as sentences. Pure."""

from collections.abc import Iterator
from statistics import median

from testbed.linkmodel import Queued
from testbed.plan import SUPER_PACKETS_PER_QUEUE, NetworkPlan, plan_network
from testbed.topology import Topology

RATE_FACTOR = 1000.0
BUFFER_BDPS = 4.0
SHORT_QUEUE_BDP = 0.1


def suspicions(topology: Topology) -> list[str]:
    """What looks like a slip of the pen; empty where nothing does."""
    plan = plan_network(topology)
    return [*_rates(plan), *_round_trips(topology), *_caps(plan), *_queues(plan), *_buffers(plan)]


def _rates(plan: NetworkPlan) -> Iterator[str]:
    """A rate far from those of its kind: a unit mistaken."""
    kinds: dict[str, dict[str, float]] = {"LAN": {}, "uplink": {}, "node uplink": {}, "path": {}}
    for link in plan.links:
        shared = link.name.rpartition("/")[0] in plan.uplinks
        kinds["uplink" if shared else "LAN"][link.name] = link.rate_mbps
        if link.node_uplink:
            kinds["node uplink"][link.name] = link.node_uplink.rate_mbps
    for path in plan.delays:
        kinds["path"][f"{path.source} to {path.target}"] = path.ceil_mbps
    for kind, rates in kinds.items():
        usual = median(rates.values()) if rates else 0.0
        lowest = min(rates.values(), default=0.0)
        for name, rate in rates.items():
            if rate >= RATE_FACTOR * lowest and rate >= RATE_FACTOR * usual:
                yield f"{kind} {name}: {rate:g} Mbit/s is {rate / usual:g} times the others' {usual:g}: is the unit right?"
            elif usual >= RATE_FACTOR * rate:
                yield f"{kind} {name}: {rate:g} Mbit/s is {usual / rate:g} times less than the others' {usual:g}: is the unit right?"
    uplinks = kinds["uplink"].values()
    if uplinks and max(uplinks) >= RATE_FACTOR * min(uplinks) and len(set(uplinks)) == 2:
        yield f"uplinks: {max(uplinks):g} Mbit/s beside {min(uplinks):g}: is the unit right?"


def _round_trips(topology: Topology) -> Iterator[str]:
    for pair in topology.wan.pairs if topology.wan else ():
        one, other = pair.between
        if pair.rtt_ms == 0:
            yield f"{one} to {other}: RTT 0 ms: no two sites are at one place"
        for two in topology.sites:
            if two in pair.between:
                continue
            way = topology.rtt_ms(one, two) + topology.rtt_ms(two, other)
            if pair.rtt_ms > 10 * way:
                yield (
                    f"{one} to {other}: RTT {pair.rtt_ms:g} ms is over ten times the way through {two} ({way:g} ms)"
                )


def _caps(plan: NetworkPlan) -> Iterator[str]:
    for path in plan.delays:
        uplink = plan.link(f"{path.source}/up").rate_mbps
        ends = min(uplink, path.rate_mbps)
        if path.cap_mbps is not None and path.cap_mbps > ends:
            yield (
                f"{path.source} to {path.target}: the cap of {path.cap_mbps:g} Mbit/s is above what the uplinks"
                f" allow ({ends:g}) and has no effect"
            )
        if path.own_class and path.cap_mbps is None and uplink <= path.rate_mbps:
            yield (
                f"{path.source} to {path.target}: its own queue stays empty, for its packets wait in the uplink"
                f" of {path.source} ({uplink:g} Mbit/s); a queue of a path needs a rate_mbps"
            )
    for node, site in plan.topology.nodes.items():
        for link, side in ((plan.link(node), "up"), (plan.link(f"{node}/down"), "down")):
            own = link.node_uplink
            if own and own.rate_mbps > link.rate_mbps:
                yield f"{node}: its own uplink ({side} {own.rate_mbps:g} Mbit/s) is faster than its LAN ({link.rate_mbps:g})"
            if own and own.rate_mbps > plan.link(f"{site}/{side}").rate_mbps:
                shared = plan.link(f"{site}/{side}").rate_mbps
                yield f"{node}: its own uplink ({side} {own.rate_mbps:g} Mbit/s) is faster than its site's ({shared:g})"


def _queues(plan: NetworkPlan) -> Iterator[str]:
    wan = plan.topology.wan
    if wan is None:
        return
    written: list[tuple[str, Queued, float, float]] = [
        (f"{p.between[0]} to {p.between[1]}", p, plan.path(*p.between).ceil_mbps, p.rtt_ms)
        for p in (wan.pairs if plan.delays else ())
    ]
    fastest = max((link.rate_mbps for link in plan.links if link.counts_control), default=0.0)
    written.append(("wan", wan, fastest, max((p.rtt_ms for p in wan.pairs), default=0.0)))
    for name, rule, rate_mbps, rtt_ms in written:
        bdp = rate_mbps * rtt_ms * 125
        length = rule.queue_bytes if rule.queue_bytes is not None else (rule.queue_bdp or 1.0) * bdp
        if length < SHORT_QUEUE_BDP * bdp:
            yield (
                f"{name}: a queue of {length / 1e3:.0f} kB is {length / bdp:.2f} bandwidth-delay products: one TCP flow"
                " will not fill the link"
            )
        if rule.queue_bytes is not None and rule.queue_bytes < SUPER_PACKETS_PER_QUEUE:
            yield (
                f"{name}: a queue of {rule.queue_bytes} bytes holds less than one super-packet, so segmentation"
                " offload is turned off everywhere, which costs processor time"
            )


def _buffers(plan: NetworkPlan) -> Iterator[str]:
    if not plan.delays:
        return
    worst = max(plan.delays, key=lambda d: plan.wan_rate_mbps(d.source, d.target) * d.delay_ms)
    rate, rtt_ms = plan.wan_rate_mbps(worst.source, worst.target), 2 * worst.delay_ms
    wanted_mb = BUFFER_BDPS * rate * rtt_ms * 125 / 1e6
    if plan.topology.tcp.buffer_mb < wanted_mb:
        yield (
            f"tcp.buffer_mb: {plan.topology.tcp.buffer_mb:g} MB is less than four bandwidth-delay products of"
            f" {worst.source} to {worst.target} ({wanted_mb:.1f} MB): the window may limit, not the link"
        )
