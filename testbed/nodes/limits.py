"""Makes the control groups of a session, reads every limit back, counts what they did, and removes them."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from testbed.errors import TestbedError
from testbed.nodes import cgroups
from testbed.nodes.cgroups import Controller, Copy, Enable, Hierarchy, Make, Step, Write
from testbed.nodes.settings import NodeSettings

STATE_FILE = "cgroups.json"
REMOVE_TIMEOUT_S = 4.0
_NOT_HERE = "run on the host itself or in a privileged container, see: dilocox doctor"


def find_hierarchies(mounts: Path = Path("/proc/mounts")) -> dict[Controller, Hierarchy]:
    """Where the controllers of this machine are."""

    def controllers_of(root: Path) -> str:
        return (root / "cgroup.controllers").read_text(encoding="ascii")

    return cgroups.hierarchies(mounts.read_text(encoding="utf-8"), controllers_of)


def check_possible(nodes: Mapping[str, NodeSettings], found: Mapping[Controller, Hierarchy]) -> None:
    """Refuses limits that this machine cannot set, before anything is made.

    Raises:
        TestbedError: one sentence that says what to do.
    """
    online = cgroups.processors(Path("/sys/devices/system/cpu/online").read_text(encoding="ascii"))
    for name, settings in nodes.items():
        for controller in cgroups.needed(settings):
            if controller not in found:
                raise TestbedError(
                    f"node {name}: its limit needs the cgroup controller {controller}, which is mounted neither as"
                    " version 1 nor as version 2: mount -t cgroup2 none /sys/fs/cgroup, or drop the limit"
                )
        if settings.cpus is not None and settings.cpus > len(online):
            raise TestbedError(
                f"node {name}: cpus: found {settings.cpus:g}, allowed are at most the {len(online)} processors"
                " of this machine: lower it, or state slower hardware as pace"
            )
        missing = cgroups.processors(settings.cpuset or "") - online
        if missing:
            raise TestbedError(
                f"node {name}: cpuset: found {settings.cpuset}, but this machine has no processor"
                f" {min(missing)}: allowed are those of {_ranges(online)}"
            )


def _ranges(numbers: frozenset[int]) -> str:
    return f"{min(numbers)}-{max(numbers)}" if len(numbers) > 1 else str(min(numbers))


@dataclass(frozen=True)
class Usage:
    """What a group's counters say; None where its controller is not in use or the kernel does not tell."""

    throttled_periods: int | None = None
    throttled_s: float | None = None
    oom_kills: int | None = None
    peak_memory_mb: float | None = None


@dataclass(frozen=True)
class NodeGroup:
    """The control groups of one node (made by us or by Docker): version and folder of each controller."""

    settings: NodeSettings
    places: Mapping[Controller, tuple[int, Path]] = field(default_factory=dict)

    def joining(self) -> list[str]:
        """A prefix for a command line: its process enters the groups first (0 stands for the writer)."""
        files = [str(folder / "cgroup.procs") for _, folder in self.places.values()]
        if not files:
            return []
        script = 'for f in "$@"; do [ "$f" = -- ] && break; echo 0 >"$f"; shift; done; shift; exec "$@"'
        return ["sh", "-euc", script, "join", *dict.fromkeys(files), "--"]

    def verify(self, node: str) -> None:
        """Reads every limit back from the kernel; TestbedError when one is not what was asked."""
        for step in cgroups.writes(self.settings, self.places):
            _verify(step, node)

    def usage(self) -> Usage:
        """Reads the counters now."""
        cpu_version, cpu = self.places.get("cpu", (0, Path()))
        memory_version, memory = self.places.get("memory", (0, Path()))
        stat = _numbers(cpu / "cpu.stat") if cpu_version else {}
        events = {1: "memory.oom_control", 2: "memory.events"}.get(memory_version)
        peak = {1: "memory.max_usage_in_bytes", 2: "memory.peak"}.get(memory_version)
        throttled_s = (
            stat["throttled_usec"] / 1e6
            if "throttled_usec" in stat
            else stat["throttled_time"] / 1e9
            if "throttled_time" in stat
            else None
        )
        peak_bytes = _first_number(memory / peak) if peak else None
        return Usage(
            throttled_periods=stat.get("nr_throttled"),
            throttled_s=throttled_s,
            oom_kills=_numbers(memory / events).get("oom_kill") if events else None,
            peak_memory_mb=None if peak_bytes is None else peak_bytes / 1e6,
        )

    def row(self) -> dict[str, Any]:
        """Limits and counters as plain data for the record."""
        asked = self.settings.model_dump(include={"cpus", "cpuset", "memory_mb"}, exclude_none=True)
        versions = {controller: version for controller, (version, _) in self.places.items()}
        return {**asked, "cgroup_version": versions, **asdict(self.usage())}

    def out_of_memory(self, node: str) -> str | None:
        """A sentence part when the kernel killed something in this group for memory."""
        usage = self.usage()
        if not usage.oom_kills:
            return None
        return (
            f"out of memory: the kernel killed it at its limit of {self.settings.memory_mb} MB"
            f" (nodes.{node}.memory_mb)"
        )


def _numbers(file: Path) -> dict[str, int]:
    try:
        pairs = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def _first_number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def make_groups(session_id: str, folder: Path, nodes: Mapping[str, NodeSettings]) -> dict[str, NodeGroup]:
    """Makes the groups of all nodes that have limits, written down in ``folder`` first; each limit is read back.

    Raises:
        TestbedError: a limit cannot be set here, or does not read back.
    """
    limited = {name: settings for name, settings in nodes.items() if settings.limited}
    if not limited:
        return {}
    found = find_hierarchies()
    check_possible(limited, found)
    steps = cgroups.plan(session_id, limited, found)
    _register(folder, steps)
    for step in steps:
        try:
            _do(step)
        except OSError as error:
            raise TestbedError(_refusal(step, error)) from error
    groups = {
        name: NodeGroup(settings, cgroups.places(session_id, name, settings, found))
        for name, settings in limited.items()
    }
    for name, group in groups.items():
        group.verify(name)
    return groups


def _refusal(step: Step, error: OSError) -> str:
    if isinstance(step, Write):
        return f"node {step.file.parent.name}: {step.key}: the kernel refuses {step.value!r} in {step.file} ({error.strerror}): {_NOT_HERE}"
    target = step.target if isinstance(step, Copy) else step.folder
    return f"limits: a control group cannot be made: {target} ({error.strerror}): {_NOT_HERE}"


def _subtree(root: Path) -> Path:
    return root / "cgroup.subtree_control"


def _do(step: Step) -> None:
    if isinstance(step, Make):
        step.folder.mkdir(mode=0o755)
    elif isinstance(step, Enable):
        there = _subtree(step.folder).read_text(encoding="ascii").split()
        for controller in step.controllers:
            if controller not in there:
                _subtree(step.folder).write_text(f"+{controller}", encoding="ascii")
    elif isinstance(step, Copy):
        step.target.write_text(step.source.read_text(encoding="ascii").strip(), encoding="ascii")
    elif step.file.exists() or not step.optional:
        step.file.write_text(step.value, encoding="ascii")


def _verify(step: Write, node: str) -> None:
    if step.optional and not step.check.exists():
        return
    try:
        got = step.check.read_text(encoding="ascii").strip()
    except OSError as error:
        raise TestbedError(
            f"node {node}: {step.key}: {step.check} cannot be read back: {error.strerror}"
        ) from error
    if not cgroups.same(step.check, step.value, got):
        raise TestbedError(
            f"node {node}: {step.key}: {step.value!r} was set but {step.check} reads {got!r}: lower the limit,"
            " or run where no outer group limits more"
        )


def _register(folder: Path, steps: list[Step]) -> None:
    """Writes down, before anything is made, what will be: groups, and controllers that were not enabled before."""
    made = [str(step.folder) for step in steps if isinstance(step, Make)]
    enabled = set()
    for step in steps:
        if isinstance(step, Enable) and _subtree(step.folder).exists():
            there = _subtree(step.folder).read_text(encoding="ascii").split()
            enabled |= {(str(step.folder), c) for c in step.controllers if c not in there}
    for other in folder.parent.glob(f"*/{STATE_FILE}"):
        # whoever leaves last takes back what the first one enabled
        with contextlib.suppress(OSError, ValueError, KeyError):
            enabled |= {(f, c) for f, c in json.loads(other.read_text(encoding="utf-8"))["enabled"]}
    text = json.dumps({"folders": made, "enabled": sorted(enabled)})
    temporary = folder / f"{STATE_FILE}.tmp"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(folder / STATE_FILE)


def registered(folder: Path) -> list[Path]:
    """The groups that a session's folder registers and that exist."""
    try:
        data = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [path for name in data["folders"] if (path := Path(name)).is_dir() and _ours(path, folder)]


def _ours(path: Path, session: Path) -> bool:
    """A damaged state file must never make us remove somebody else's group."""
    mark = f"{cgroups.PREFIX}{session.name}"
    return mark in (path.name, path.parent.name)


def remove_groups(folder: Path) -> None:
    """Removes the groups that a session's folder registers, and what is left in them; nothing else.

    Raises:
        TestbedError: a group does not go within some seconds.
    """
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    for path in reversed(registered(folder)):
        while path.is_dir():
            try:
                path.rmdir()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise TestbedError(f"control group {path} cannot be removed: {error.strerror}") from error
                _kill_members(path)
                time.sleep(0.01)
    try:
        enabled = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))["enabled"]
    except (OSError, ValueError, KeyError):
        return
    for root, controller in enabled:
        # busy where another session's (or anybody's) groups use it: then it stays
        with contextlib.suppress(OSError):
            _subtree(Path(root)).write_text(f"-{controller}", encoding="ascii")


def _kill_members(path: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (path / "cgroup.procs").read_text(encoding="ascii").split():
            if int(pid) > 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def try_limit(settings: NodeSettings, session_id: str, folder: Path) -> tuple[bool, str]:
    """Sets one limit in a scratch group of a session, reads it back and removes it: what ``dilocox doctor`` does."""
    (controller,) = cgroups.needed(settings)
    try:
        group = make_groups(session_id, folder, {"scratch": settings})["scratch"]
        version, place = group.places[controller]
    except TestbedError as error:
        return False, str(error)
    else:
        return True, f"cgroup v{version}, {place.parents[1]}: set and read back"
    finally:
        remove_groups(folder)
