"""Rate: tc htb on a link's egress, as commands for ``tc -batch`` and as a check of what the kernel made of them.

Class 1:1 is the link; 1:10 carries the data, 1:20 (site uplinks) the rendezvous traffic, told apart by its port
so that control bytes have a counter of their own. Both may borrow the whole rate. 1:30 (nodes with an uplink of
their own) carries what leaves or enters the site, at that uplink's rate.

htb keeps a class's own ``rate`` even where its parent is exhausted, so the rates of a link's classes add up to at
most the link's; the ceilings are what is asked for.
"""

import re
from collections.abc import Mapping

from testbed.errors import TestbedError
from testbed.plan import CONTROL_PORT, Link

DATA_CLASS = 0x10
CONTROL_CLASS = 0x20
NODE_UPLINK_CLASS = 0x30
CONTROL_SHARE = 0.01
MIN_BURST_BYTES = 2 * 1514
QUANTUM_BYTES = 60_000
RATE_TOLERANCE = 1e-3
_CLASS_LINE = re.compile(r"class htb 1:(\w+) .*?\brate (\S+) ceil (\S+)")
_UNIT_MBPS = {"bit": 1e-6, "Kbit": 1e-3, "Mbit": 1.0, "Gbit": 1e3, "Tbit": 1e6}


def burst_bytes(rate_mbps: float) -> int:
    """One millisecond at the rate, at least two full frames: more would let short transfers run ahead."""
    return max(MIN_BURST_BYTES, round(rate_mbps * 1e6 / 8 * 1e-3))


def _class(link: Link, minor: int, parent: str, rate_mbps: float) -> str:
    burst = burst_bytes(link.rate_mbps)
    return (
        f"class add dev {link.interface} parent {parent} classid 1:{minor:x} htb"
        f" rate {max(1000, round(rate_mbps * 1e6))}bit ceil {round(link.rate_mbps * 1e6)}bit"
        f" burst {burst} cburst {burst} quantum {QUANTUM_BYTES}"
    )


def commands(link: Link) -> list[str]:
    """tc commands that shape one link and bound its queue in bytes."""
    dev = link.interface
    share = CONTROL_SHARE if link.counts_control else 0.0
    own = link.node_uplink
    own_mbps = min(own.rate_mbps, link.rate_mbps / 2) if own else 0.0
    sure_mbps = link.rate_mbps * (1 - share - link.reserved_share) - own_mbps
    lines = [
        f"qdisc add dev {dev} root handle 1: htb default {DATA_CLASS:x}",
        _class(link, 1, "1:", link.rate_mbps),
        _class(link, DATA_CLASS, "1:1", sure_mbps),
        leaf_queue(dev, DATA_CLASS, link.queue_bytes),
    ]
    if link.counts_control:
        lines.append(_class(link, CONTROL_CLASS, "1:1", link.rate_mbps * share))
        lines.append(leaf_queue(dev, CONTROL_CLASS, link.queue_bytes))
        lines += [
            f"filter add dev {dev} parent 1: protocol ip prio 1 u32 match ip protocol 6 0xff"
            f" match ip {side} {CONTROL_PORT} 0xffff flowid 1:{CONTROL_CLASS:x}"
            for side in ("sport", "dport")
        ]
    if own:
        lines += [
            child_class(dev, NODE_UPLINK_CLASS, own_mbps, min(own.rate_mbps, link.rate_mbps)),
            leaf_queue(dev, NODE_UPLINK_CLASS, own.queue_bytes),
            f"filter add dev {dev} parent 1: protocol ip prio 1 u32 match ip {own.side} {own.site_subnet}"
            f" flowid 1:{DATA_CLASS:x}",
            f"filter add dev {dev} parent 1: protocol ip prio 2 u32 match u32 0 0 flowid 1:{NODE_UPLINK_CLASS:x}",
        ]
    return lines


def child_class(dev: str, minor: int, sure_mbps: float, ceil_mbps: float) -> str:
    """tc command for a class beneath a link: sure of one rate, held to another."""
    burst = burst_bytes(ceil_mbps)
    return (
        f"class add dev {dev} parent 1:1 classid 1:{minor:x} htb rate {max(1000, round(sure_mbps * 1e6))}bit"
        f" ceil {round(ceil_mbps * 1e6)}bit burst {burst} cburst {burst} quantum {QUANTUM_BYTES}"
    )


def leaf_queue(dev: str, minor: int, limit_bytes: int) -> str:
    """tc command for the queue of a class."""
    return f"qdisc add dev {dev} parent 1:{minor:x} handle {minor:x}: bfifo limit {limit_bytes}"


def _parse_mbps(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|Kbit|Mbit|Gbit|Tbit)", text)
    if not match:
        raise TestbedError(f"tc printed the rate {text!r}, which is not understood")
    return float(match[1]) * _UNIT_MBPS[match[2]]


def verify(link: Link, class_show: str) -> None:
    """Compares ``tc class show`` of a link with what was asked; raises TestbedError when they differ."""
    wanted = {1: link.rate_mbps, DATA_CLASS: link.rate_mbps}
    if link.counts_control:
        wanted[CONTROL_CLASS] = link.rate_mbps
    if link.node_uplink:
        wanted[NODE_UPLINK_CLASS] = min(link.node_uplink.rate_mbps, link.rate_mbps)
    verify_ceilings(f"link {link.name}", wanted, class_show)


def verify_ceilings(what: str, wanted: Mapping[int, float], class_show: str) -> None:
    """Compares the classes' ceilings (minor number -> Mbit/s) in ``tc class show`` with those asked for."""
    ceilings = {match[1]: _parse_mbps(match[3]) for match in _CLASS_LINE.finditer(class_show)}
    for minor, rate_mbps in wanted.items():
        got = ceilings.get(f"{minor:x}")
        if got is None or abs(got - rate_mbps) > RATE_TOLERANCE * rate_mbps + 1e-3:
            raise TestbedError(
                f"{what}: asked tc for {rate_mbps:g} Mbit/s in class 1:{minor:x},"
                f" the kernel reports {'nothing' if got is None else f'{got:g} Mbit/s'}"
            )
