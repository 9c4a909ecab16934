"""Limits as control groups, version 1 or 2, decided for each controller: which files get which values. Pure.

A machine may have its controllers on version 1, on version 2, or on both in part (hybrid); a controller is only ever
on one. Groups are ``dilocox-<session>/<node>`` below the mount of each controller that a limit needs.

Sources: Documentation/admin-guide/cgroup-v1/{memory,cpusets}.rst, scheduler/sched-bwc.rst and cgroup-v2.rst of the
kernel.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from testbed.nodes.settings import NodeSettings

Controller = Literal["cpu", "cpuset", "memory"]
CONTROLLERS: tuple[Controller, ...] = ("cpu", "cpuset", "memory")
PREFIX = "dilocox-"
PERIOD_US = 20_000
"""A node that has used its quota waits for the next period: at the usual 100 ms that alone would look like a WAN."""
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Hierarchy:
    """Where a controller is: the mount of its version 1 hierarchy, or that of version 2."""

    version: Literal[1, 2]
    root: Path


@dataclass(frozen=True)
class Make:
    """Make this folder."""

    folder: Path


@dataclass(frozen=True)
class Enable:
    """Version 2: give the children of ``folder`` these controllers (``cgroup.subtree_control``)."""

    folder: Path
    controllers: tuple[Controller, ...]


@dataclass(frozen=True)
class Copy:
    """Version 1 starts a cpuset empty: take a file's value from the parent."""

    source: Path
    target: Path


@dataclass(frozen=True)
class Write:
    """Write a limit; it must read back from ``check`` (the file itself unless the kernel tells elsewhere)."""

    file: Path
    value: str
    check: Path
    key: str  # of the topology: cpus, cpuset, memory_mb
    optional: bool = False  # where the kernel has no such file (no swap accounting)


Step = Make | Enable | Copy | Write


def hierarchies(mounts: str, controllers_of: Callable[[Path], str]) -> dict[Controller, Hierarchy]:
    """Finds each controller.

    Args:
        mounts: the text of /proc/mounts.
        controllers_of: the text of a version 2 mount's ``cgroup.controllers``.
    """
    found: dict[Controller, Hierarchy] = {}
    for line in mounts.splitlines():
        _, root, kind, options, *_ = line.split()
        if kind == "cgroup2":
            version: Literal[1, 2] = 2
            names = controllers_of(Path(root)).split()
        elif kind == "cgroup":
            version, names = 1, options.split(",")
        else:
            continue
        for controller in CONTROLLERS:
            if controller in names:
                found.setdefault(controller, Hierarchy(version, Path(root)))
    return found


def needed(settings: NodeSettings) -> tuple[Controller, ...]:
    """The controllers that a node's limits need."""
    wanted: dict[Controller, object] = {
        "cpu": settings.cpus,
        "cpuset": settings.cpuset,
        "memory": settings.memory_mb,
    }
    return tuple(controller for controller, value in wanted.items() if value is not None)


def quota_us(cpus: float) -> int:
    """Microseconds of processor time in each period."""
    return round(cpus * PERIOD_US)


def limit_bytes(memory_mb: int) -> int:
    """The limit in whole pages: the kernel rounds, and what is read back must be what was asked."""
    return memory_mb * 1_000_000 // PAGE_BYTES * PAGE_BYTES


def writes(settings: NodeSettings, places: Mapping[Controller, tuple[int, Path]]) -> list[Write]:
    """The files of a node's limits, given version and folder of each controller."""
    steps = []
    for controller in needed(settings):
        version, folder = places[controller]
        if controller == "cpu" and settings.cpus is not None:
            quota = quota_us(settings.cpus)
            values = (
                {"cpu.max": f"{quota} {PERIOD_US}"}
                if version == 2
                else {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota)}
            )
            steps += [Write(folder / f, v, folder / f, "cpus") for f, v in values.items()]
        elif controller == "cpuset" and settings.cpuset is not None:
            file = folder / "cpuset.cpus"
            told = folder / "cpuset.cpus.effective" if version == 2 else file
            steps.append(Write(file, settings.cpuset, told, "cpuset"))
        elif settings.memory_mb is not None:
            size = str(limit_bytes(settings.memory_mb))
            limit, swap, swap_value = (
                ("memory.max", "memory.swap.max", "0")
                if version == 2
                else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", size)
            )
            steps.append(Write(folder / limit, size, folder / limit, "memory_mb"))
            steps.append(Write(folder / swap, swap_value, folder / swap, "memory_mb", optional=True))
    return steps


def plan(
    session_id: str, nodes: Mapping[str, NodeSettings], found: Mapping[Controller, Hierarchy]
) -> list[Step]:
    """Every step that the limits of all nodes need, in order."""
    steps: list[Step] = []
    wanted = tuple(c for c in CONTROLLERS if any(c in needed(s) for s in nodes.values()))
    unified = tuple(c for c in wanted if found[c].version == 2)
    for root in dict.fromkeys(found[c].root for c in wanted):
        base = root / f"{PREFIX}{session_id}"
        if unified and root == found[unified[0]].root:
            steps += [Enable(root, unified), Make(base), Enable(base, unified)]
        else:
            steps.append(Make(base))
        steps += [Make(base / n) for n, s in nodes.items() if any(found[c].root == root for c in needed(s))]
    for name, settings in nodes.items():
        here = places(session_id, name, settings, found)
        version, folder = here.get("cpuset", (2, Path()))
        if version == 1:
            base, root = folder.parent, folder.parent.parent
            for parent, child in ((root, base), (base, folder)):
                steps += [Copy(parent / f, child / f) for f in ("cpuset.mems", "cpuset.cpus")]
        steps += writes(settings, here)
    return steps


def places(
    session_id: str, node: str, settings: NodeSettings, found: Mapping[Controller, Hierarchy]
) -> dict[Controller, tuple[int, Path]]:
    """Version and folder of a node's group for each controller that it needs."""
    return {c: (found[c].version, found[c].root / f"{PREFIX}{session_id}" / node) for c in needed(settings)}


def same(file: Path, wanted: str, got: str) -> bool:
    """Whether a file reads back what was written; the kernel orders and joins the ranges of a cpuset."""
    if file.name.startswith("cpuset.cpus"):
        return processors(wanted) == processors(got)
    return wanted.split() == got.split()


def processors(cpuset: str) -> frozenset[int]:
    """The processors of a list such as ``0-3,6``."""
    numbers: set[int] = set()
    for part in cpuset.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers |= set(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
