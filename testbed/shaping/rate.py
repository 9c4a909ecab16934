"""Rate: tc htb on a link's egress, as commands for ``tc -batch`` and as a check of what the kernel made of them.

Class 1:1 is the link; 1:10 carries the data, 1:20 (site uplinks) the rendezvous traffic, told apart by its port
so that control bytes have a counter of their own. Both may borrow the whole rate.
"""

import re

from testbed.errors import TestbedError
from testbed.plan import CONTROL_PORT, Link

DATA_CLASS = 0x10
CONTROL_CLASS = 0x20
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
    lines = [
        f"qdisc add dev {dev} root handle 1: htb default {DATA_CLASS:x}",
        _class(link, 1, "1:", link.rate_mbps),
        _class(link, DATA_CLASS, "1:1", link.rate_mbps * (1 - share)),
        f"qdisc add dev {dev} parent 1:{DATA_CLASS:x} handle {DATA_CLASS:x}: bfifo limit {link.queue_bytes}",
    ]
    if link.counts_control:
        lines.append(_class(link, CONTROL_CLASS, "1:1", link.rate_mbps * share))
        lines.append(
            f"qdisc add dev {dev} parent 1:{CONTROL_CLASS:x} handle {CONTROL_CLASS:x}: bfifo limit {link.queue_bytes}"
        )
        lines += [
            f"filter add dev {dev} parent 1: protocol ip prio 1 u32 match ip protocol 6 0xff"
            f" match ip {side} {CONTROL_PORT} 0xffff flowid 1:{CONTROL_CLASS:x}"
            for side in ("sport", "dport")
        ]
    return lines


def _parse_mbps(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|Kbit|Mbit|Gbit|Tbit)", text)
    if not match:
        raise TestbedError(f"tc printed the rate {text!r}, which is not understood")
    return float(match[1]) * _UNIT_MBPS[match[2]]


def verify(link: Link, class_show: str) -> None:
    """Compares ``tc class show`` of a link with what was asked; raises TestbedError when they differ."""
    ceilings = {match[1]: _parse_mbps(match[3]) for match in _CLASS_LINE.finditer(class_show)}
    wanted = ["1", f"{DATA_CLASS:x}"] + ([f"{CONTROL_CLASS:x}"] if link.counts_control else [])
    for minor in wanted:
        got = ceilings.get(minor)
        if got is None or abs(got - link.rate_mbps) > RATE_TOLERANCE * link.rate_mbps + 1e-3:
            raise TestbedError(
                f"link {link.name}: asked tc for {link.rate_mbps:g} Mbit/s in class 1:{minor},"
                f" the kernel reports {'nothing' if got is None else f'{got:g} Mbit/s'}"
            )
