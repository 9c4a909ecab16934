"""Was this machine able to keep its promises during the run? What it measures decides whether a run is valid."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LATENESS_P99_MS = 1.0
"""A delay line later than this (or 2 % of the shortest delay, if that is more) makes a run invalid."""
LATENESS_SHARE = 0.02
STEAL_SHARE = 0.05
"""Time that the hypervisor took from this machine, as a share of all CPU time."""


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


@dataclass
class Fidelity:
    """What was watched, and every broken promise as a sentence."""

    cpu_busy_share: float = 0.0
    softirq_share: float = 0.0
    steal_share: float = 0.0
    lateness_p50_ms: float | None = None
    lateness_p99_ms: float | None = None
    lateness_max_ms: float | None = None
    delay_line_packets: int | None = None
    nfqueue_drops: int = 0
    direct_packets: int = 0
    dropped_packets: int = 0
    problems: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """As plain data for the record."""
        return asdict(self)


def judge(
    *,
    before: CpuTimes,
    after: CpuTimes,
    delay_stats: dict[str, float] | None,
    delay_alive: bool,
    shortest_delay_ms: float,
    direct_packets: dict[str, int],
    dropped_packets: int,
) -> Fidelity:
    """Puts the measurements together and names what was not kept. Pure."""
    total = max(1, after.total - before.total)
    result = Fidelity(
        cpu_busy_share=(after.busy - before.busy) / total,
        softirq_share=(after.softirq - before.softirq) / total,
        steal_share=(after.steal - before.steal) / total,
        direct_packets=sum(direct_packets.values()),
        dropped_packets=dropped_packets,
    )
    if not delay_alive:
        result.problems.append("the delay line died: its links went dark")
    if delay_stats is not None:
        result.lateness_p50_ms = delay_stats["p50_ms"]
        result.lateness_p99_ms = delay_stats["p99_ms"]
        result.lateness_max_ms = delay_stats["max_ms"]
        result.delay_line_packets = int(delay_stats["packets"])
        result.nfqueue_drops = int(delay_stats["drops"])
        allowed_ms = max(LATENESS_P99_MS, LATENESS_SHARE * shortest_delay_ms)
        if result.lateness_p99_ms > allowed_ms:
            result.problems.append(
                f"the delay line released packets late: p99 {result.lateness_p99_ms:.2f} ms,"
                f" allowed {allowed_ms:.2f} ms"
            )
        if result.nfqueue_drops:
            result.problems.append(f"the delay line's queues dropped {result.nfqueue_drops} packets")
    for link, count in direct_packets.items():
        if count:
            result.problems.append(f"link {link}: {count} packets went out unshaped")
    if result.steal_share > STEAL_SHARE:
        result.problems.append(
            f"the hypervisor took {100 * result.steal_share:.1f} % of the CPU, allowed {100 * STEAL_SHARE:g} %"
        )
    return result
