"""All tc commands of a plan, and those that lead from one plan to another."""

from testbed.plan import CORE, NetworkPlan
from testbed.shaping import netem, paths, rate


def commands(plan: NetworkPlan, delay: str) -> dict[str, list[str]]:
    """Namespace -> lines for ``tc -batch`` that shape everything; ``delay``: how delays are made here."""
    lines: dict[str, list[str]] = {}
    for link in plan.links:
        lines.setdefault(link.owner, []).extend(rate.commands(link))
    if delay == "netem":
        lines[CORE].extend(netem.commands(plan))
    elif delay == "nfqueue":
        lines[CORE].extend(paths.commands(plan))
    return lines


def changes(old: NetworkPlan, new: NetworkPlan, delay: str) -> dict[str, list[str]]:
    """Namespace -> lines that turn the shaping of one plan into that of another with the same links and paths."""
    before, after = commands(old, delay), commands(new, delay)
    return {
        owner: changed
        for owner in after
        if (
            changed := [
                line.replace(" add ", " change ", 1)
                for was, line in zip(before[owner], after[owner], strict=True)
                if was != line
            ]
        )
    }
