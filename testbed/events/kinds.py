"""What can happen, as people write it: one model for each verb, checked together with the topology.

An event has a trigger (a time, a training step, a round, or a period), a verb (``do``) and what the verb acts on.
``testbed.events.schedule`` turns events into changes in time; docs/events.md shows an example of each.
"""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from testbed.events.timing import MIN_PERIOD_S, Lasting, Quartiles, Timed, ascending
from testbed.events.traces import Points, check_points
from testbed.units import MIN_RATE_MBPS, RateMbps

MAX_RTT_MS = 5000
MAX_EVENTS = 1000


class RateEvent(Lasting):
    """The rate of one direction of a link (``link``), or of both directions of a site's uplink (``site``)."""

    do: Literal["rate"]
    link: str | None = None
    site: str | None = None
    rate_mbps: RateMbps | None = None
    up_mbps: RateMbps | None = None
    down_mbps: RateMbps | None = None
    rate_quartiles_mbps: Quartiles | None = None
    seed: int = 0

    @field_validator("rate_quartiles_mbps")
    @classmethod
    def _ordered(cls, value: Quartiles | None) -> Quartiles | None:
        if value is not None and value[0] < MIN_RATE_MBPS:
            raise ValueError(f"allowed are rates of at least {MIN_RATE_MBPS} Mbit/s")
        return ascending(value)

    @model_validator(mode="after")
    def _one_target_one_value(self) -> Self:
        if (self.link is None) == (self.site is None):
            raise ValueError("allowed is exactly one of link, site")
        one = [self.rate_mbps, self.rate_quartiles_mbps]
        both = [self.up_mbps, self.down_mbps]
        single, sides = sum(v is not None for v in one), sum(v is not None for v in both)
        if not (single == 1 and sides == 0) and not (self.site is not None and single == 0 and sides > 0):
            raise ValueError(
                "allowed is exactly one of rate_mbps, rate_quartiles_mbps, or for a site up_mbps and/or down_mbps"
            )
        return self

    @property
    def text(self) -> str:
        """What it does, in words."""
        what = f"link {self.link}" if self.link else f"uplink of {self.site}"
        if self.rate_quartiles_mbps:
            low, high = self.rate_quartiles_mbps[0], self.rate_quartiles_mbps[-1]
            return f"rate of {what} drawn from {low:g} to {high:g} Mbit/s{self.lasting}"
        sides = [("up", self.up_mbps), ("down", self.down_mbps)]
        rates = [f"{side} {mbps:g}" for side, mbps in sides if mbps is not None]
        return f"rate of {what}: {' and '.join(rates) or f'{self.rate_mbps:g}'} Mbit/s{self.lasting}"


class RttEvent(Lasting):
    """Round-trip time of the path between two sites, its jitter, or both."""

    do: Literal["rtt"]
    pair: tuple[str, str]
    rtt_ms: float | None = Field(default=None, ge=0, le=MAX_RTT_MS)
    rtt_quartiles_ms: Quartiles | None = None
    jitter_ms: float | None = Field(default=None, ge=0)
    seed: int = 0

    @field_validator("rtt_quartiles_ms")
    @classmethod
    def _ordered(cls, value: Quartiles | None) -> Quartiles | None:
        if value is not None and not (value[0] >= 0 and value[-1] <= MAX_RTT_MS):
            raise ValueError(f"allowed are round-trip times of 0 to {MAX_RTT_MS} ms")
        return ascending(value)

    @model_validator(mode="after")
    def _something_changes(self) -> Self:
        if self.rtt_ms is not None and self.rtt_quartiles_ms is not None:
            raise ValueError("allowed is one of rtt_ms, rtt_quartiles_ms")
        if self.rtt_ms is None and self.rtt_quartiles_ms is None and self.jitter_ms is None:
            raise ValueError("allowed is at least one of rtt_ms, rtt_quartiles_ms, jitter_ms")
        return self

    @property
    def least_rtt_ms(self) -> float | None:
        """The shortest round-trip time that it can bring."""
        return self.rtt_quartiles_ms[0] if self.rtt_quartiles_ms else self.rtt_ms

    @property
    def text(self) -> str:
        """What it does, in words."""
        parts = []
        if self.rtt_quartiles_ms:
            parts.append(f"drawn from {self.rtt_quartiles_ms[0]:g} to {self.rtt_quartiles_ms[-1]:g} ms")
        elif self.rtt_ms is not None:
            parts.append(f"{self.rtt_ms:g} ms")
        if self.jitter_ms is not None:
            parts.append(f"jitter {self.jitter_ms:g} ms")
        return f"RTT {self.pair[0]} – {self.pair[1]}: {', '.join(parts)}{self.lasting}"


class LossEvent(Lasting):
    """Share of the packets lost each way between two sites."""

    do: Literal["loss"]
    pair: tuple[str, str]
    loss: float = Field(ge=0, le=0.5)

    @property
    def text(self) -> str:
        """What it does, in words."""
        return f"loss {self.pair[0]} – {self.pair[1]}: {100 * self.loss:g} %{self.lasting}"


TargetKind = Literal["site", "pair", "node", "link"]


class OnTarget(Lasting):
    """Acts on the way of packets: a site's uplink, the path of a pair, a node, or one direction of an uplink."""

    site: str | None = None
    pair: tuple[str, str] | None = None
    node: str | None = None
    link: str | None = None

    def targets(self) -> list[TargetKind]:
        """Which of the four keys are given."""
        keys: tuple[TargetKind, ...] = ("site", "pair", "node", "link")
        return [key for key in keys if getattr(self, key) is not None]

    @property
    def kind(self) -> TargetKind:
        """Which of the four keys is given."""
        return self.targets()[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The name behind it; of a pair both."""
        value = getattr(self, self.kind)
        return tuple(value) if self.kind == "pair" else (value,)

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if len(self.targets()) != 1 and not (isinstance(self, UpEvent) and not self.targets()):
            raise ValueError("allowed is exactly one of site, pair, node, link")
        return self

    @property
    def target(self) -> str:
        """What it acts on, in words."""
        if not self.targets():
            return "everything"
        return f"{'path' if self.kind == 'pair' else self.kind} {' – '.join(self.names)}"


class DownEvent(OnTarget):
    """Every packet on the way is lost without a word, as when a WAN dies somewhere behind the modem."""

    do: Literal["down"]

    @property
    def text(self) -> str:
        """What it does, in words."""
        return f"{self.target} down{self.lasting}"


class UpEvent(OnTarget):
    """Ends a ``down``, ``flap`` or ``partition`` there; without a target, all of them."""

    do: Literal["up"]

    @field_validator("for_s")
    @classmethod
    def _for_good(cls, value: float | None) -> float | None:
        if value is not None:
            raise ValueError("allowed is nothing: up lasts")
        return value

    @property
    def text(self) -> str:
        """What it does, in words."""
        return f"{self.target} up again"


class FlapEvent(OnTarget):
    """Down for ``down_s`` at the start of every ``period_s``, for ``for_s`` or to the end."""

    do: Literal["flap"]
    period_s: float = Field(ge=2 * MIN_PERIOD_S, le=1e6)
    down_s: float = Field(ge=MIN_PERIOD_S)

    @model_validator(mode="after")
    def _some_of_it_up(self) -> Self:
        if self.down_s > self.period_s - MIN_PERIOD_S:
            raise ValueError(
                f"down_s: found {self.down_s:g}, allowed is at most period_s - {MIN_PERIOD_S:g}"
                f" ({self.period_s - MIN_PERIOD_S:g})"
            )
        if self.every_s is not None and self.for_s is None:
            raise ValueError("for_s: found nothing, allowed is a time below every_s")
        return self

    @property
    def text(self) -> str:
        """What it does, in words."""
        return f"{self.target} flaps: {self.down_s:g} s down in every {self.period_s:g} s{self.lasting}"


class PartitionEvent(Lasting):
    """The named sites still reach each other, and nobody else reaches them."""

    do: Literal["partition"]
    sites: list[str] = Field(min_length=1)

    @property
    def text(self) -> str:
        """What it does, in words."""
        return f"{', '.join(self.sites)} cut off from the other sites{self.lasting}"


class NodeEvent(Timed):
    """The programs of a node die by SIGKILL, or are started again with the same contract (killed before, if alive)."""

    do: Literal["kill", "restart", "thaw"]
    node: str

    @property
    def text(self) -> str:
        """What it does, in words."""
        return f"{self.do} {self.node}"


class FreezeEvent(Lasting):
    """The programs of a node stand still (SIGSTOP to the whole tree); ``for_s`` or ``thaw`` lets them go on."""

    do: Literal["freeze"]
    node: str

    @property
    def text(self) -> str:
        """What it does, in words."""
        return f"freeze {self.node}{self.lasting}"


class TraceEvent(Lasting):
    """The rate of one direction of a link follows a recording: ``file`` (CSV with t_s and rate_mbps, or Mahimahi's
    format) is read with the topology and kept in it as ``points``, (t_s, rate_mbps) each.
    """

    do: Literal["trace"]
    link: str
    file: str | None = None
    loop: bool = False
    bin_s: float = Field(default=0.1, ge=MIN_PERIOD_S, le=10)
    points: Points | None = None

    @field_validator("points")
    @classmethod
    def _readable(cls, value: Points | None) -> Points | None:
        if value is not None:
            check_points(value)
        return value

    @model_validator(mode="after")
    def _some_points(self) -> Self:
        if self.points is None:
            raise ValueError("allowed is a file, or points: [[t_s, rate_mbps], ...]")
        if self.every_s is not None and self.for_s is None:
            raise ValueError("for_s: found nothing, allowed is a time below every_s")
        return self

    @property
    def text(self) -> str:
        """What it does, in words."""
        points = self.points or []
        rates = [rate for _, rate in points]
        named = f" {self.file.rpartition('/')[2]}" if self.file else ""
        return (
            f"link {self.link} follows the trace{named} ({len(points)} points, {min(rates):g} to {max(rates):g}"
            f" Mbit/s{', looped' if self.loop else ''}){self.lasting}"
        )


AnyEvent = (
    RateEvent
    | RttEvent
    | LossEvent
    | DownEvent
    | UpEvent
    | FlapEvent
    | PartitionEvent
    | NodeEvent
    | FreezeEvent
    | TraceEvent
)
Event = Annotated[AnyEvent, Field(discriminator="do")]
Events = Annotated[list[Event], Field(max_length=MAX_EVENTS)]


def verbs() -> list[str]:
    """Every ``do`` that there is."""
    return [verb for model in get_args(AnyEvent) for verb in get_args(model.model_fields["do"].annotation)]


def describe(event: AnyEvent) -> str:
    """An event as one line."""
    return f"{event.when}: {event.text}"


def names_in(event: AnyEvent) -> list[tuple[str, str]]:
    """(kind, name) of everything that an event names: kind is site, node or link."""
    found: list[tuple[str, Any]] = [(kind, getattr(event, kind, None)) for kind in ("site", "node", "link")]
    found += [("site", site) for site in getattr(event, "pair", None) or ()]
    found += [("site", site) for site in getattr(event, "sites", ())]
    return [(kind, name) for kind, name in found if name is not None]
