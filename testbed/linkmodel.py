"""What people write of links: LANs, uplinks, the paths between sites. Pure data, checked; part of a Topology."""

from typing import Self

from pydantic import Field, model_validator

from testbed.units import RateMbps
from testbed.validation import Strict

MAX_RTT_MS = 5000
MIN_MTU, MAX_MTU = 576, 9000
MIN_WRITTEN_QUEUE_BYTES = 2 * (MAX_MTU + 14)
"""Two frames of the largest kind: a shorter queue would drop what never had to wait."""
MAX_QUEUE_BYTES = 4_000_000_000
DEFAULT_QUEUE_BDP = 1.0


class _BothWays(Strict):
    """A link's rate, as ``rate_mbps`` or as ``up_mbps`` and ``down_mbps``."""

    rate_mbps: RateMbps | None = None
    up_mbps: RateMbps | None = None
    down_mbps: RateMbps | None = None

    @model_validator(mode="after")
    def _one_way_of_saying_it(self) -> Self:
        both = self.up_mbps is not None and self.down_mbps is not None
        neither = self.up_mbps is None and self.down_mbps is None
        if not ((self.rate_mbps is not None and neither) or (self.rate_mbps is None and both)):
            raise ValueError("allowed is either rate_mbps, or up_mbps and down_mbps together")
        return self

    @property
    def up(self) -> float:
        """Mbit/s away from the nodes."""
        return self.rate_mbps if self.rate_mbps is not None else self.up_mbps or 0.0

    @property
    def down(self) -> float:
        """Mbit/s towards the nodes."""
        return self.rate_mbps if self.rate_mbps is not None else self.down_mbps or 0.0


class Lan(_BothWays):
    """Inside a site: every node has its own link of this rate to the site's router; 10 Gbit/s unless said otherwise.

    ``rtt_ms`` is what the figure's source states; it is below what a delay line can keep, so nothing is
    added and the path's own RTT (measured, in the record) stands for it.
    """

    rtt_ms: float = Field(default=0.2, ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _default_rate(cls, data: object) -> object:
        said = isinstance(data, dict) and any(
            data.get(key) is not None for key in ("rate_mbps", "up_mbps", "down_mbps")
        )
        return data if said or not isinstance(data, dict) else {**data, "rate_mbps": 10_000.0}


class Uplink(_BothWays):
    """A connection to the WAN: of a site, shared by its nodes, or (``node_uplink``) of each node for itself."""


class Queued(Strict):
    """A queue's length: in bandwidth-delay products or in bytes, not both."""

    queue_bdp: float | None = Field(default=None, gt=0, le=100)
    queue_bytes: int | None = Field(default=None, ge=MIN_WRITTEN_QUEUE_BYTES, le=MAX_QUEUE_BYTES)

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.queue_bdp is not None and self.queue_bytes is not None:
            raise ValueError(
                f"queue_bytes: found {self.queue_bytes} beside queue_bdp {self.queue_bdp:g}; allowed is one of them"
            )
        return self


class Pair(Queued):
    """The path between two sites; half of ``rtt_ms`` is applied each way.

    ``jitter_ms``: each packet's one-way delay is drawn evenly from half the RTT ± this, and packets never overtake.
    ``loss``: share of packets lost each way, independently.
    ``rate_mbps``: a cap of this path, each way, beneath what the uplinks allow.
    ``queue_bdp`` (of the path's rate and RTT) or ``queue_bytes``: this path's own queue at the far end of the WAN.
    ``mtu``: IP packets above this size do not pass, and their sender is told so.
    """

    between: tuple[str, str]
    rtt_ms: float = Field(ge=0, le=MAX_RTT_MS)
    jitter_ms: float = Field(default=0, ge=0)
    loss: float = Field(default=0, ge=0, le=0.5)
    rate_mbps: RateMbps | None = None
    mtu: int | None = Field(default=None, ge=MIN_MTU, le=MAX_MTU)

    @model_validator(mode="after")
    def _jitter_below_delay(self) -> Self:
        if self.jitter_ms > self.rtt_ms / 2:
            raise ValueError(
                f"jitter_ms: found {self.jitter_ms:g}, allowed is at most half of rtt_ms ({self.rtt_ms / 2:g})"
            )
        return self


class Wan(Queued):
    """Site uplinks and the matrix of round-trip times between sites.

    ``uplink`` is shared by a site's nodes; ``node_uplink`` is besides that each node's own. The queues of both hold
    one bandwidth-delay product of the longest path unless said otherwise.
    """

    uplink: Uplink
    node_uplink: Uplink | None = None
    pairs: list[Pair] = Field(default_factory=list)
