"""Flows as fluids: rates by weighted max-min fair sharing, recomputed when a flow starts, ends or opens its window.

Exact between events, because rates are constant there; no packets, no queues, no losses. A flow of k
streams weighs k. TCP's window and slow start are caps on a flow's rate: window / RTT, doubled each
round trip of a cold connection from ten segments a stream (RFC 6928) until a link is what limits it; a
connection that has reached that once stays warm (the emulator turns slow start after idle off).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import simpy

from testbed.simulation.links import INITIAL_WINDOW_SEGMENTS, Links

Floats = npt.NDArray[np.float64]
NEARLY = 1e-9
"""A flow with less than this share of its volume left has ended: rounding, not bytes."""


@dataclass(eq=False)
class Flow:
    """A message under way."""

    departed: simpy.Event
    arrived: simpy.Event
    links: tuple[int, ...]
    delay_s: float
    left_bytes: float
    whole_bytes: float
    weight: float
    ceiling_bps: float  # what window and chunks allow once open
    opening_bps: float  # what slow start allows now
    rtt_s: float
    key: tuple[int, int]
    rate_bps: float = 0.0

    @property
    def opening(self) -> bool:
        """Whether slow start still holds it back."""
        return self.opening_bps < self.ceiling_bps


def fair_rates(
    capacity_bps: Floats, crossings: npt.NDArray[np.intp], weights: Floats, caps_bps: Floats
) -> Floats:
    """Weighted max-min fair rates by progressive filling.

    Args:
        capacity_bps: [links]; the last one is a dummy of infinite capacity.
        crossings: [flows, k], the links that each flow crosses, filled up with the dummy.
        weights: [flows], above 0.
        caps_bps: [flows], what each flow can use at most; may be infinite.

    Returns: [flows], bytes per second.
    """
    rates = np.zeros(len(weights))
    free = np.ones(len(weights), dtype=bool)
    left = capacity_bps.astype(float).copy()
    left[-1] = 0.0  # the dummy: never looked at
    while free.any():
        load = _by_link(crossings[free], weights[free], len(left))
        with np.errstate(divide="ignore", invalid="ignore"):
            per_weight = np.where(load > 0, np.maximum(left, 0.0) / load, np.inf)
        per_weight[-1] = np.inf
        share = per_weight[crossings].min(axis=1) * weights
        level = np.minimum(share, caps_bps)
        # everybody whose bottleneck is the tightest one, or whose cap lies below its share, is settled
        tightest = (share / weights)[free].min()
        capped = free & (caps_bps <= share * (1 + 1e-12)) & (caps_bps / weights <= tightest * (1 + 1e-12))
        settled = capped if capped.any() else free & (share / weights <= tightest * (1 + 1e-12))
        rates[settled] = level[settled]
        left -= _by_link(crossings[settled], level[settled], len(left))
        free &= ~settled
    return rates


def _by_link(crossings: npt.NDArray[np.intp], amounts: Floats, links: int) -> Floats:
    """Sum of `amounts` [flows] over the flows that cross each link: [links]."""
    sums = np.bincount(crossings.ravel(), np.repeat(amounts, crossings.shape[1]), minlength=links)
    return sums.astype(np.float64, copy=False)


class FluidNetwork:
    """Flows over `links` in a SimPy environment."""

    def __init__(self, environment: simpy.Environment, links: Links) -> None:
        self.environment, self.links = environment, links
        self._factors: list[list[float]] = [[] for _ in links.capacity_bps]
        self._width = max((len(path.links) for path in links.paths.values()), default=1)
        self._flows: list[Flow] = []
        self._open_bps: dict[tuple[int, int], float] = {}
        self._updated = environment.now
        self._planned = 0  # tells the latest plan from outdated ones
        self._due = False

    def send(
        self,
        source: int,
        target: int,
        size_bytes: float,
        *,
        streams: float = 1.0,
        window_bytes: float | None = None,
    ) -> tuple[simpy.Event, simpy.Event]:
        """Two events: the last byte has left the source's queue, and it has arrived at `target`."""
        path = self.links.paths[source, target]
        departed, arrived = self.environment.event(), self.environment.event()
        key = (source, target)
        rtt_s = max(path.rtt_s, 1e-9)
        window = path.window_bytes * streams
        if window_bytes is not None:
            window = min(window, window_bytes)
        cold_bps = INITIAL_WINDOW_SEGMENTS * path.segment_bytes * streams / rtt_s
        flow = Flow(
            departed,
            arrived,
            path.links,
            path.delay_s,
            float(size_bytes),
            float(size_bytes),
            streams,
            window / rtt_s,
            self._open_bps.get(key, cold_bps),
            rtt_s,
            key,
        )
        self._flows.append(flow)
        self._ask_for_plan()
        return departed, arrived

    def weaken(self, link: int, factor: float) -> None:
        """From now on the link has this share of what it had (0: down)."""
        self._factors[link].append(factor)
        self._ask_for_plan()

    def mend(self, link: int, factor: float) -> None:
        """Takes one `weaken` back."""
        self._factors[link].remove(factor)
        self._ask_for_plan()

    def _ask_for_plan(self) -> None:
        """Plan once for everything that happens at this instant."""
        if not self._due:
            self._due = True
            self._after(0.0, self._plan_now)

    def _after(self, delay_s: float, act: Callable[[], object]) -> None:
        self.then(self.environment.timeout(delay_s), act)

    @staticmethod
    def then(event: simpy.Event, act: Callable[[], object]) -> None:
        """Calls `act` when an event that has not happened yet happens."""
        if event.callbacks is None:
            raise RuntimeError("the event has already happened")

        def call(_: simpy.Event) -> None:
            act()

        event.callbacks.append(call)

    def _plan_now(self) -> None:
        self._due = False
        self._advance()
        self._plan()

    def _advance(self) -> None:
        """Move the bytes that travelled since the last change, open windows, and end flows that are through."""
        elapsed = self.environment.now - self._updated
        self._updated = self.environment.now
        if not elapsed:
            return
        remaining = []
        for flow in self._flows:
            flow.left_bytes -= flow.rate_bps * elapsed
            if flow.left_bytes <= NEARLY * flow.whole_bytes:
                flow.departed.succeed()
                self._after(flow.delay_s, flow.arrived.succeed)
            else:
                remaining.append(flow)
            if flow.opening and flow.rate_bps >= flow.opening_bps * (1 - NEARLY):
                flow.opening_bps *= 2 ** (elapsed / flow.rtt_s)
                self._open_bps[flow.key] = flow.opening_bps
        self._flows = remaining

    def _plan(self) -> None:
        """New rates, and one wake-up for when the first of them ceases to hold."""
        self._planned += 1
        if not self._flows:
            return
        flows, dummy = self._flows, len(self.links.capacity_bps)
        crossings = np.full((len(flows), self._width), dummy, dtype=np.intp)
        for row, flow in enumerate(flows):
            crossings[row, : len(flow.links)] = flow.links
        capacity = np.append(
            np.asarray(self.links.capacity_bps) * [math.prod(f) for f in self._factors], np.inf
        )
        weights = np.array([flow.weight for flow in flows])
        caps = np.array([min(flow.ceiling_bps, flow.opening_bps) for flow in flows])
        rates = fair_rates(capacity, crossings, weights, caps)
        soonest = np.inf
        for flow, rate in zip(flows, rates.tolist(), strict=True):
            flow.rate_bps = rate
            if rate > 0:
                soonest = min(soonest, flow.left_bytes / rate)
            if not flow.opening or rate <= 0:
                continue
            if rate < flow.opening_bps * (1 - NEARLY):
                # a link limits it: the window has opened far enough, and stays so
                flow.opening_bps = self._open_bps[flow.key] = np.inf
            else:
                soonest = min(soonest, flow.rtt_s)
        if np.isfinite(soonest):
            plan = self._planned
            self._after(soonest, lambda: self._plan_now() if plan == self._planned else None)
