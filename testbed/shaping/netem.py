"""Delay by netem: on the core's egress to a site, one htb class for every other site with a netem queue below it.

Every ordered pair of sites has a class of its own here (testbed/shaping/paths.py), capped or not.
The default wherever the kernel has ``sch_netem``. netem's own ``limit`` of 1000 packets collapses at 1 Gbit/s
and 100 ms; here it holds what is in flight and the link's queue. A limit in packets does not bound a queue in bytes
(a super-packet of many segments counts as one), so the link's queue is a bfifo below netem: packets go there when
their delay is over, and wait there for their turn.
"""

import json

from testbed.errors import TestbedError
from testbed.plan import DelayClass, NetworkPlan
from testbed.shaping.paths import classes, path_class, path_filter
from testbed.units import WIRE_BYTES_PER_SEGMENT

TOLERANCE_MS = 0.01
TOLERANCE_LOSS = 1e-6


def limit_packets(delay: DelayClass) -> int:
    """Packets in flight during the delay at full rate, plus the link's queue."""
    in_flight_bytes = delay.ceil_mbps * 1e6 / 8 * delay.delay_ms / 1e3
    return 64 + round((in_flight_bytes + delay.queue_bytes) / WIRE_BYTES_PER_SEGMENT)


def commands(plan: NetworkPlan) -> list[str]:
    """tc commands for the core; to be run after the rate commands of its links."""
    lines = []
    for delay, minor in classes(plan):
        dev = delay.to_interface
        lines += [
            path_class(delay, minor),
            f"qdisc add dev {dev} parent 1:{minor:x} handle {minor:x}: netem"
            f" delay {round(delay.delay_ms * 1000)}us limit {limit_packets(delay)}"
            + (f" loss {100 * delay.loss:g}%" if delay.loss else ""),
            f"qdisc add dev {dev} parent {minor:x}:1 bfifo limit {delay.queue_bytes}",
            path_filter(delay, minor),
        ]
    return lines


def verify(plan: NetworkPlan, qdisc_show: str) -> None:
    """Compares ``tc -j qdisc show`` of the core with what was asked; raises TestbedError when they differ."""
    got = {(q["dev"], q["parent"]): q["options"] for q in json.loads(qdisc_show) if q["kind"] == "netem"}
    for delay, minor in classes(plan):
        options = got.pop((delay.to_interface, f"1:{minor:x}"), {})
        delay_ms = options.get("delay", {}).get("delay", 0.0) * 1e3
        loss = options.get("loss-random", {}).get("loss", 0.0)
        if abs(delay_ms - delay.delay_ms) > TOLERANCE_MS or abs(loss - delay.loss) > TOLERANCE_LOSS:
            raise TestbedError(
                f"{delay.source} to {delay.target}: asked netem for {delay.delay_ms:g} ms and a loss of"
                f" {delay.loss:g}, the kernel reports {delay_ms:g} ms and {loss:g}"
            )
