"""The links that flows share, taken from a Topology: what each path crosses, how long it is, what TCP allows.

Rates here are of TCP payload: the layer-2 rate times (MTU - 52) / (MTU + 14), as the emulator delivers.
"""

from __future__ import annotations

from dataclasses import dataclass

from testbed.topology import Topology
from testbed.units import goodput_mbps

INITIAL_WINDOW_SEGMENTS = 10
"""RFC 6928; Linux's default."""


@dataclass(frozen=True)
class Path:
    """One direction between two sites: indices of the links that it crosses, one-way delay, TCP's limits.

    `window_bytes`: what one flow may have under way (socket buffers); `segment_bytes`: payload of a segment.
    """

    links: tuple[int, ...]
    delay_s: float
    window_bytes: float
    segment_bytes: int

    @property
    def rtt_s(self) -> float:
        """Round trip of an empty path."""
        return 2 * self.delay_s


@dataclass(frozen=True)
class Links:
    """`capacity_bps`: payload bytes per second of each link; `paths[i, j]`: from site i to site j."""

    names: tuple[str, ...]
    capacity_bps: tuple[float, ...]
    paths: dict[tuple[int, int], Path]

    @property
    def sites(self) -> int:
        """How many sites there are."""
        return 1 + max((i for i, _ in self.paths), default=0)

    @classmethod
    def of(cls, topology: Topology) -> Links:
        """Site uplinks and downlinks of a topology (and caps of site pairs); LANs are taken as ample."""
        sites = list(topology.sites)
        names, rates = [], []
        for site in sites:
            uplink = topology.uplink(site)
            names += [f"{site}/up", f"{site}/down"]
            rates += [uplink.up, uplink.down]
        paths = {}
        for i, source in enumerate(sites):
            for j, target in enumerate(sites):
                if i == j:
                    continue
                crossed = [2 * i, 2 * j + 1]
                cap_mbps = getattr(topology.pair(source, target), "rate_mbps", None)
                if cap_mbps is not None:
                    crossed.append(len(names))
                    names.append(f"{source}>{target}")
                    rates.append(cap_mbps)
                paths[i, j] = Path(
                    tuple(crossed),
                    topology.rtt_ms(source, target) / 2e3,
                    topology.tcp.buffer_mb
                    * 1e6
                    / 2,  # half of a socket buffer is window (tcp_adv_win_scale 1)
                    topology.mtu - 52,
                )
        capacities = tuple(goodput_mbps(rate, topology.mtu) * 1e6 / 8 for rate in rates)
        return cls(tuple(names), capacities, paths)

    @classmethod
    def uniform(
        cls,
        sites: int,
        rate_mbps: float,
        rtt_ms: float,
        *,
        shared: bool = False,
        buffer_mb: float = 64.0,
        mtu: int = 1500,
    ) -> Links:
        """`sites` sites with one rate and one RTT; `shared`: all traffic crosses one link both ways."""
        rate_bps = goodput_mbps(rate_mbps, mtu) * 1e6 / 8
        if shared:
            names: tuple[str, ...] = ("path",)
        else:
            names = tuple(f"{site}/{way}" for site in range(sites) for way in ("up", "down"))
        paths = {
            (i, j): Path((0,) if shared else (2 * i, 2 * j + 1), rtt_ms / 2e3, buffer_mb * 1e6 / 2, mtu - 52)
            for i in range(sites)
            for j in range(sites)
            if i != j
        }
        return cls(names, (rate_bps,) * len(names), paths)
