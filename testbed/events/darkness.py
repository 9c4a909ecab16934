"""Which parts of a network are down: what a probe must not find an answer from."""

from testbed.plan import CORE, DelayClass, NetworkPlan


def _cut(plan: NetworkPlan, owner: str, from_interface: str | None, to_interface: str | None) -> bool:
    """Whether a router drops what it would forward between two interfaces (None: some interface that is no cut's)."""
    return any(
        cut.owner == owner
        and cut.from_interface in (None, from_interface)
        and cut.to_interface in (None, to_interface)
        for cut in plan.cuts
    )


def node_is_dark(plan: NetworkPlan, node: str) -> bool:
    """Whether packets to or from a node are lost at its site's router."""
    port = plan.link(f"{node}/down")
    return _cut(plan, port.owner, port.interface, None) or _cut(plan, port.owner, None, port.interface)


def lit_node(plan: NetworkPlan, site: str) -> str | None:
    """The first node of a site that is not down."""
    return next((n for n in plan.topology.nodes_of(site) if not node_is_dark(plan, n)), None)


def is_dark(plan: NetworkPlan, path: DelayClass) -> bool:
    """Whether nothing that is sent between two sites is ever answered: one direction is enough for that."""
    ways = [d for d in plan.delays if {d.source, d.target} == {path.source, path.target}]
    lit = lit_node(plan, path.source) and lit_node(plan, path.target)
    return not lit or any(_cut(plan, CORE, d.from_interface, d.to_interface) for d in ways)
