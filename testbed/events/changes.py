"""What a change makes of a network, as a function from plan to plan: nothing here touches the kernel."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from testbed.events.schedule import Change, CutOff, LetThrough, SetPath, SetRate
from testbed.plan import CORE, Cut, DelayClass, Link, NetworkPlan


@dataclass(frozen=True)
class State:
    """The network as it should be now: the plan with its present figures, and who cut what (event number, cut)."""

    plan: NetworkPlan
    held: frozenset[tuple[int, Cut]] = frozenset()

    def with_held(self, held: frozenset[tuple[int, Cut]]) -> "State":
        """The same with other cuts; a place that several events cut stays cut until the last of them lets go."""
        return State(replace(self.plan, cuts=frozenset(cut for _, cut in held)), held)


def apply(state: State, change: Change, base: NetworkPlan) -> State:
    """The state after one change; figures that a change gives back come from ``base``, the plan of the topology."""
    if isinstance(change, SetRate):
        rate = base.link(change.link).rate_mbps if change.rate_mbps is None else change.rate_mbps
        return replace(state, plan=_with_rate(state.plan, change.link, rate))
    if isinstance(change, SetPath):
        return replace(state, plan=_with_path(state.plan, change, base))
    if isinstance(change, CutOff):
        cuts = cuts_of(base, change.kind, change.names)
        return state.with_held(state.held | {(change.holder, cut) for cut in cuts})
    if isinstance(change, LetThrough):
        return state.with_held(frozenset(h for h in state.held if not _lets(change, h, base)))
    raise TypeError(f"{change!r} changes no network")


def _lets(change: LetThrough, held: tuple[int, Cut], base: NetworkPlan) -> bool:
    if change.kind is not None:
        return held[1] in cuts_of(base, change.kind, change.names)
    return change.holder is None or held[0] == change.holder


def _with_rate(plan: NetworkPlan, name: str, rate_mbps: float) -> NetworkPlan:
    def link(one: Link) -> Link:
        return replace(one, rate_mbps=rate_mbps) if one.name == name else one

    def delay(one: DelayClass) -> DelayClass:
        return replace(one, rate_mbps=rate_mbps) if one.link == name else one

    return replace(plan, links=tuple(map(link, plan.links)), delays=tuple(map(delay, plan.delays)))


def _with_path(plan: NetworkPlan, change: SetPath, base: NetworkPlan) -> NetworkPlan:
    asked = {(d.source, d.target): d for d in base.delays}
    value = change.value
    new: dict[str, Callable[[DelayClass], DelayClass]] = {
        "rtt_ms": lambda d: replace(
            d, delay_ms=asked[d.source, d.target].delay_ms if value is None else value / 2
        ),
        "jitter_ms": lambda d: replace(
            d, jitter_ms=asked[d.source, d.target].jitter_ms if value is None else value
        ),
        "loss": lambda d: replace(d, loss=asked[d.source, d.target].loss if value is None else value),
    }
    return replace(
        plan,
        delays=tuple(
            new[change.what](d) if {d.source, d.target} == set(change.pair) else d for d in plan.delays
        ),
    )


def cuts_of(plan: NetworkPlan, kind: str, names: tuple[str, ...]) -> set[Cut]:
    """Where packets must be lost so that a target is down: in the core for sites, in the site's router for a node."""
    if kind == "node":
        port = plan.link(f"{names[0]}/down")
        return {Cut(port.owner, port.interface, None), Cut(port.owner, None, port.interface)}
    if kind == "link":
        return _cuts_of_link(plan, names[0])
    between = [(d.source in names, d.target in names) for d in plan.delays]
    cut = {"pair": (True, True), "site": None, "sites": None}[kind]
    return {
        Cut(CORE, d.from_interface, d.to_interface)
        for d, sides in zip(plan.delays, between, strict=True)
        if (sides == cut if cut else sides[0] != sides[1])
    }


def _cuts_of_link(plan: NetworkPlan, name: str) -> set[Cut]:
    owner, _, side = name.partition("/")
    if owner in plan.node_address:
        port = plan.link(f"{owner}/down")
        return {Cut(port.owner, None, port.interface) if side else Cut(port.owner, port.interface, None)}
    port = plan.link(f"{owner}/down")
    return {
        Cut(port.owner, None, port.interface) if side == "down" else Cut(port.owner, port.interface, None)
    }
