"""The path between two sites where it has figures of its own: a rate cap, a queue, an MTU; all in the core.

The cap is an htb class on the core's egress to the target, beneath the target's downlink: it may take what the cap
and the downlink allow. Paths without figures of their own share the downlink's queue (with netem each has a class,
since its delay hangs there).

The MTU is a route of its own for packets that come from one site and go to another. The core answers packets that
are larger and must not be fragmented with ICMP, and TCP learns the path's MTU as it does on the Internet.
"""

import json
from collections.abc import Iterator

from testbed.errors import TestbedError
from testbed.plan import CORE, DelayClass, NetworkPlan
from testbed.shaping.rate import child_class, leaf_queue, verify_ceilings

FIRST_CLASS = 0x100
FIRST_TABLE = 1000
RULE_PRIORITY = 1000


def classes(plan: NetworkPlan) -> list[tuple[DelayClass, int]]:
    """Each ordered pair of sites with the minor number of its htb class on the core's egress to the target."""
    sources: dict[str, int] = {}
    return [(d, FIRST_CLASS + sources.setdefault(d.source, len(sources))) for d in plan.delays]


def path_class(path: DelayClass, minor: int) -> str:
    """tc command for a path's class."""
    return child_class(path.to_interface, minor, path.sure_mbps, path.ceil_mbps)


def path_filter(path: DelayClass, minor: int) -> str:
    """tc command that leads a path's packets into its class."""
    return (
        f"filter add dev {path.to_interface} parent 1: protocol ip prio 2 u32 match ip src {path.source_subnet}"
        f" flowid 1:{minor:x}"
    )


def commands(plan: NetworkPlan) -> list[str]:
    """tc commands for the core where the delay line delays; netem makes its classes itself."""
    lines = []
    for path, minor in classes(plan):
        if path.own_class:
            queue = leaf_queue(path.to_interface, minor, path.queue_bytes)
            lines += [path_class(path, minor), queue, path_filter(path, minor)]
    return lines


def verify(plan: NetworkPlan, class_shows: dict[str, str], qdisc_show: str) -> None:
    """Compares rates and queues of paths with what was asked.

    Args:
        plan: what was asked.
        class_shows: interface of the core -> ``tc class show`` of it.
        qdisc_show: ``tc -j qdisc show`` of the core.

    Raises:
        TestbedError: they differ.
    """
    queues = {
        (q["dev"], q["parent"]): q["options"].get("limit") for q in json.loads(qdisc_show) if "parent" in q
    }
    for path, minor in classes(plan):
        if not path.own_class:
            continue
        name = f"path {path.source} to {path.target}"
        verify_ceilings(name, {minor: path.ceil_mbps}, class_shows[path.to_interface])
        below_netem, direct = (path.to_interface, f"{minor:x}:1"), (path.to_interface, f"1:{minor:x}")
        got = queues.get(below_netem, queues.get(direct))
        if got != path.queue_bytes:
            raise TestbedError(
                f"{name}: asked tc for a queue of {path.queue_bytes} bytes, the kernel reports {got}"
            )


def _with_mtu(plan: NetworkPlan) -> Iterator[tuple[int, DelayClass, str, str]]:
    """(routing table, path, subnet of the target, its router) for each path with an MTU of its own."""
    routes = {destination: via for owner, destination, via in plan.routes if owner == CORE}
    for number, path in enumerate(plan.delays):
        if path.mtu is not None:
            subnet = plan.path(path.target, path.source).source_subnet
            yield FIRST_TABLE + number, path, subnet, routes[subnet]


def mtu_commands(plan: NetworkPlan) -> list[str]:
    """``ip -batch`` lines for the core."""
    lines = []
    for table, path, subnet, via in _with_mtu(plan):
        lines += [
            f"route add {subnet} via {via} mtu {path.mtu} table {table}",
            f"rule add iif {path.from_interface} to {subnet} lookup {table} priority {RULE_PRIORITY + table}",
        ]
    return lines


def verify_mtus(plan: NetworkPlan, route_show: str, rule_show: str) -> None:
    """Compares ``ip -j route show table all`` and ``ip -j rule show`` of the core with what was asked."""
    routes = {(r.get("table"), r.get("dst")): r for r in json.loads(route_show)}
    rules = {(r.get("iif"), r.get("table")) for r in json.loads(rule_show)}
    for table, path, subnet, _ in _with_mtu(plan):
        metrics = routes.get((str(table), subnet), {}).get("metrics", [{}])
        got = metrics[0].get("mtu")
        if got != path.mtu or (path.from_interface, str(table)) not in rules:
            raise TestbedError(
                f"path {path.source} to {path.target}: asked for an MTU of {path.mtu} bytes, the kernel reports {got}"
            )
