"""What events need of a topology: names that it has, figures that fit; and the extremes that they bring."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from testbed.events import kinds

if TYPE_CHECKING:
    from testbed.plan import DelayClass
    from testbed.topology import Topology


def check_events(events: Sequence[kinds.AnyEvent], topology: "Topology") -> None:
    """Raises ValueError with one sentence for the first event that names what the topology does not have."""
    if not events:
        return
    allowed = {
        "site": list(topology.sites),
        "node": list(topology.nodes),
        "link": _links(topology),
    }
    for number, event in enumerate(events):
        where = f"events.{number}"
        for kind, name in kinds.names_in(event):
            if name not in allowed[kind]:
                shown = allowed[kind][:12]
                more = ", ..." if len(allowed[kind]) > len(shown) else ""
                raise ValueError(
                    f"{where}: found the unknown {kind} {name!r}; allowed: {', '.join(shown)}{more}"
                )
        pair = getattr(event, "pair", None)
        if pair and pair[0] == pair[1]:
            raise ValueError(f"{where}.pair: found {list(pair)}; allowed are two different sites")
        _check_wan(event, where, topology)
        _check_jitter(event, where, topology, events)


def _links(topology: "Topology") -> list[str]:
    wan = [f"{site}/{side}" for site in topology.sites for side in ("up", "down") if len(topology.sites) > 1]
    return wan + [name for node in topology.nodes for name in (node, f"{node}/down")]


def _check_wan(event: kinds.AnyEvent, where: str, topology: "Topology") -> None:
    sites = [name for kind, name in kinds.names_in(event) if kind == "site"]
    if sites and len(topology.sites) < 2:
        raise ValueError(
            f"{where}: found the site {sites[0]!r}, allowed are nodes: with one site there is no WAN"
        )
    if isinstance(event, kinds.PartitionEvent) and set(event.sites) >= set(topology.sites):
        raise ValueError(
            f"{where}.sites: found every site, allowed are some of them: nobody would be cut off"
        )


def _check_jitter(
    event: kinds.AnyEvent, where: str, topology: "Topology", events: Sequence[kinds.AnyEvent]
) -> None:
    """Jitter must stay below half the RTT whichever of the events on a path came last."""
    if not isinstance(event, kinds.RttEvent):
        return
    path = topology.pair(*event.pair)
    others = [e for e in events if isinstance(e, kinds.RttEvent) and set(e.pair) == set(event.pair)]
    jitter_ms = max([path.jitter_ms, *(e.jitter_ms or 0.0 for e in others)])
    least_ms = min([path.rtt_ms, *(e.least_rtt_ms for e in others if e.least_rtt_ms is not None)])
    if jitter_ms > least_ms / 2:
        raise ValueError(
            f"{where}: found a jitter of {jitter_ms:g} ms and an RTT of {least_ms:g} ms on one path,"
            f" allowed is a jitter of at most half the RTT"
        )


def longest_event_rtt_ms(events: Sequence[kinds.AnyEvent]) -> float:
    """The longest round-trip time that events bring; queues are sized for it."""
    found = [
        e.rtt_quartiles_ms[-1] if e.rtt_quartiles_ms else e.rtt_ms or 0.0
        for e in events
        if isinstance(e, kinds.RttEvent)
    ]
    return max(found, default=0.0)


def highest_event_rate_mbps(events: Sequence[kinds.AnyEvent], link: str) -> float:
    """The highest rate that events give to a link; its queue is sized for it, and does not change with the rate."""
    found = [0.0]
    for event in events:
        if isinstance(event, kinds.TraceEvent) and event.link == link:
            found += [rate for _, rate in event.points or []]
        if isinstance(event, kinds.RateEvent) and link in (
            event.link,
            f"{event.site}/{link.rpartition('/')[2]}",
        ):
            side = event.up_mbps if link.endswith("/up") else event.down_mbps
            drawn = event.rate_quartiles_mbps[-1] if event.rate_quartiles_mbps else 0.0
            found += [event.rate_mbps or 0.0, side or 0.0, drawn]
    return max(found)


def shortest_delay_ms(delays: Sequence["DelayClass"], events: Sequence[kinds.AnyEvent]) -> float:
    """The shortest one-way delay that the network has or gets by an event; 0 without a WAN."""
    by_event = [
        e.least_rtt_ms / 2 for e in events if isinstance(e, kinds.RttEvent) and e.least_rtt_ms is not None
    ]
    return min([d.delay_ms for d in delays] + by_event, default=0.0)
