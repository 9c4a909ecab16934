"""Delay by netem: on the core's egress to a site, one htb class for every other site with a netem queue below it.

Every ordered pair of sites has a class of its own here (testbed/shaping/paths.py), capped or not.
The default wherever the kernel has ``sch_netem``. netem's own ``limit`` of 1000 packets collapses at 1 Gbit/s
and 100 ms; here it holds what is in flight and the link's queue. A limit in packets does not bound a queue in bytes
(a super-packet of many segments counts as one), so the link's queue is a bfifo below netem: packets go there when
their delay is over, and wait there for their turn.
"""

from testbed.plan import DelayClass, NetworkPlan
from testbed.shaping.paths import classes, path_class, path_filter
from testbed.units import WIRE_BYTES_PER_SEGMENT


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
