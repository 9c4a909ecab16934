"""Was this machine able to keep its promises during the run? What it measures decides whether a run is valid.

Everything is the difference of two states of the machine, one before the programs start and one after their end,
so that neither building the network nor probing it hides or excuses what happened meanwhile.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from testbed import lateness
from testbed.thresholds import (
    LATENESS_MAX_MS,
    LATENESS_MAX_SHARE,
    LATENESS_P99_MS,
    LATENESS_SHARE,
    STEAL_SHARE,
    THROTTLED_SHARE,
)


@dataclass(frozen=True)
class CpuTimes:
    """Ticks since boot from /proc/stat, all processors together."""

    busy: int
    softirq: int
    steal: int
    total: int

    @staticmethod
    def now(stat: Path = Path("/proc/stat")) -> "CpuTimes":
        """Reads the first line of /proc/stat."""
        fields = [int(f) for f in stat.read_text(encoding="ascii").splitlines()[0].split()[1:9]]
        _user, _nice, _system, idle, iowait, _irq, softirq, steal = fields
        return CpuTimes(sum(fields) - idle - iowait, softirq, steal, sum(fields))


def throttled_s(membership: str, root: Path = Path("/sys/fs/cgroup")) -> float:
    """Seconds for which CPU quotas have held back the control groups of ``membership`` and those above them.

    Args:
        membership: the text of /proc/self/cgroup.
        root: where control groups are mounted, version 1 (a folder a controller) or 2.
    """
    total = 0.0
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        base = root if number == "0" else root / controllers
        group = base / path.lstrip("/")
        for folder in [group, *(p for p in group.parents if p.is_relative_to(base))]:
            total += _throttled_in(folder / "cpu.stat")
    return total


def _throttled_in(stat: Path) -> float:
    try:
        facts = dict(line.split() for line in stat.read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return 0.0
    return int(facts.get("throttled_usec", 0)) / 1e6 + int(facts.get("throttled_time", 0)) / 1e9


@dataclass(frozen=True)
class MachineState:
    """Counters that only grow, at one moment."""

    t: float  # seconds on the monotonic clock
    cpu: CpuTimes
    throttled_s: float
    delay_stats: Mapping[str, Any] | None  # of the delay line; None where there is none

    @staticmethod
    def now(delay_stats: Mapping[str, Any] | None) -> "MachineState":
        """Reads them."""
        membership = Path("/proc/self/cgroup").read_text(encoding="ascii")
        return MachineState(time.monotonic(), CpuTimes.now(), throttled_s(membership), delay_stats)


@dataclass
class Fidelity:
    """What was watched, and every broken promise as a sentence."""

    cpu_busy_share: float = 0.0
    softirq_share: float = 0.0
    steal_share: float = 0.0
    throttled_share: float = 0.0
    lateness_p50_ms: float | None = None
    lateness_p99_ms: float | None = None
    lateness_max_ms: float | None = None
    delay_line_packets: int | None = None
    nfqueue_drops: int = 0
    direct_packets: int = 0
    dropped_packets: int = 0
    backlog_max_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """As plain data for the record."""
        return asdict(self)


def judge(
    *,
    before: MachineState,
    after: MachineState,
    delay_alive: bool,
    shortest_delay_ms: float,
    direct_packets: dict[str, int],
    dropped_packets: int,
    backlog_max_bytes: int = 0,
) -> Fidelity:
    """Puts the measurements together and names what was not kept. Pure."""
    total = max(1, after.cpu.total - before.cpu.total)
    result = Fidelity(
        cpu_busy_share=(after.cpu.busy - before.cpu.busy) / total,
        softirq_share=(after.cpu.softirq - before.cpu.softirq) / total,
        steal_share=(after.cpu.steal - before.cpu.steal) / total,
        throttled_share=(after.throttled_s - before.throttled_s) / max(1e-9, after.t - before.t),
        direct_packets=sum(direct_packets.values()),
        dropped_packets=dropped_packets,
        backlog_max_bytes=backlog_max_bytes,
    )
    if not delay_alive:
        result.problems.append("the delay line died: its links went dark")
    if before.delay_stats is not None and after.delay_stats is not None:
        _judge_delay_line(result, before.delay_stats, after.delay_stats, shortest_delay_ms)
    for link, count in direct_packets.items():
        if count:
            result.problems.append(f"link {link}: {count} packets went out unshaped")
    if result.steal_share > STEAL_SHARE:
        result.problems.append(
            f"the hypervisor took {100 * result.steal_share:.1f} % of the CPU, allowed {100 * STEAL_SHARE:g} %"
        )
    if result.throttled_share > THROTTLED_SHARE:
        result.problems.append(
            f"a control group's quota held this machine back for {100 * result.throttled_share:.1f} % of the"
            f" time, allowed {100 * THROTTLED_SHARE:g} %"
        )
    return result


def _judge_delay_line(
    result: Fidelity, before: Mapping[str, Any], after: Mapping[str, Any], shortest_delay_ms: float
) -> None:
    counts = lateness.between(before["histogram"], after["histogram"])
    result.delay_line_packets = sum(counts)
    result.lateness_p50_ms = lateness.quantile_ms(counts, 0.5)
    result.lateness_p99_ms = lateness.quantile_ms(counts, 0.99)
    result.lateness_max_ms = lateness.quantile_ms(counts, 1.0)
    result.nfqueue_drops = int(after["drops"] - before["drops"])
    for what, value_ms, allowed_ms in (
        ("p99", result.lateness_p99_ms, max(LATENESS_P99_MS, LATENESS_SHARE * shortest_delay_ms)),
        ("at worst", result.lateness_max_ms, max(LATENESS_MAX_MS, LATENESS_MAX_SHARE * shortest_delay_ms)),
    ):
        if value_ms > allowed_ms:
            result.problems.append(
                f"the delay line released packets late: {what} {value_ms:.2f} ms, allowed {allowed_ms:.2f} ms"
            )
    if result.nfqueue_drops:
        result.problems.append(f"the delay line's queues dropped {result.nfqueue_drops} packets")
