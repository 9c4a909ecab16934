"""What a simulated run is given besides its workload, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Straggler:
    """Replica `replica` takes `pace` times as long for a step."""

    replica: int
    pace: float


@dataclass(frozen=True)
class Outage:
    """From `at_s`, for `for_s` seconds, `link` has `factor` of its capacity (0: down)."""

    link: int
    at_s: float
    for_s: float
    factor: float = 0.0


@dataclass(frozen=True)
class Pause:
    """A replica fails at `at_s` and computes nothing for `for_s` seconds (restart included)."""

    replica: int
    at_s: float
    for_s: float


@dataclass(frozen=True)
class Conditions:
    """What the hardware does: slow replicas, jitter of steps (lognormal, sigma), outages, failures; by seed."""

    stragglers: tuple[Straggler, ...] = ()
    jitter_sigma: float = 0.0
    outages: tuple[Outage, ...] = ()
    pauses: tuple[Pause, ...] = ()
    seed: int = 0

    @property
    def steady(self) -> bool:
        """Whether every round sees the same conditions."""
        return not (self.jitter_sigma or self.outages or self.pauses)


@dataclass
class Replica:
    """Seconds of one replica, by what it did; payload bytes that it handed over."""

    compute_s: float = 0.0
    busy_s: float = 0.0
    exposed_comm_s: float = 0.0
    comm_s: float = 0.0
    sent_bytes: int = 0

    def values(self) -> tuple[float, ...]:
        """All of them, in a fixed order."""
        return (self.compute_s, self.busy_s, self.exposed_comm_s, self.comm_s, float(self.sent_bytes))


@dataclass(frozen=True)
class Outcome:
    """A simulated run. `events`: SimPy steps that it took; `repeated`: block iterations not simulated one by one."""

    wall_s: float
    tokens: int
    steps: int
    replicas: tuple[Replica, ...]
    events: int
    repeated: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all replicas per second of wall time."""
        return self.tokens / self.wall_s if self.wall_s else 0.0

    @property
    def utilisation(self) -> float:
        """Mean over replicas of compute time / wall time."""
        return self._mean("compute_s") / self.wall_s if self.wall_s else 0.0

    @property
    def exposed_comm_s(self) -> float:
        """Mean over replicas."""
        return self._mean("exposed_comm_s")

    @property
    def sent_bytes(self) -> int:
        """Payload of all replicas."""
        return sum(replica.sent_bytes for replica in self.replicas)

    def _mean(self, name: str) -> float:
        total: float = sum(getattr(replica, name) for replica in self.replicas)
        return total / len(self.replicas)
