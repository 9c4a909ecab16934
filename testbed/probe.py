"""Measures every WAN pair and compares it with the topology: no result may exist over a link that is off."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from testbed.access import AccessMeasured, measure_accesses
from testbed.events.darkness import is_dark, lit_node
from testbed.measure import (
    UDP_HEADER_BYTES,
    count_answers,
    measure_goodput_mbps,
    measure_mtu_kept,
    measure_rtt_ms,
    measure_udp,
    udp_payload_bytes,
)
from testbed.network import Network
from testbed.plan import DelayClass
from testbed.units import goodput_mbps

RTT_TOLERANCE_MS = 1.0
RTT_TOLERANCE_SHARE = 0.02
RATE_TOLERANCE_SHARE = 0.03
LOSS_SIGMAS = 4.0
"""A binomial count lies outside so many standard deviations once in 16,000 measurements."""
UDP_SHARE = 0.5
"""Loss is measured at this share of the rate, where no queue overflows."""
UDP_OVERLOAD = 1.1
"""The rate of a lossy link is what arrives when so much of it is sent: TCP there is slow for its own reasons."""
TRIES = 3
"""A second's hiccup of the machine is measured again; a link that is really off stays off. All tries are kept."""
SHORT_RTT_MS = 30.0
"""Above it, what slow start lost is still being filled in during the second second (docs/LOG.md)."""
AT_ONCE_MBPS = 2000.0
"""Pairs that share no link are measured at once up to this sum of rates: more would measure this machine."""


@dataclass(frozen=True)
class Measured:
    """One direction between two sites, as asked for and as measured."""

    source: str
    target: str
    rtt_wanted_ms: float
    rtt_ms: float  # median
    rate_wanted_mbps: float  # layer 2
    goodput_wanted_mbps: float  # TCP payload that this rate can carry
    goodput_mbps: float
    tries: int = 1  # measurements until the link kept its promise, or all that were allowed
    jitter_wanted_ms: float = 0.0
    loss_wanted: float = 0.0
    packets: int = 0  # sent to measure the loss
    lost: int = 0
    cap_mbps: float | None = None
    mtu: int | None = None  # of this path, in bytes of IP
    mtu_kept: bool | None = None  # a packet of that size passed, one of a byte more did not
    answers: int | None = None  # to pings over a path that is down by an event; None for all others

    @property
    def problems(self) -> list[str]:
        """What is off, as sentences; empty when the link keeps its promise."""
        found: list[str] = []
        if self.answers is not None:
            said = f"{self.source}-{self.target}: is down by an event, yet {self.answers} pings were answered"
            return [said] if self.answers else []
        allowed_ms = max(RTT_TOLERANCE_MS, RTT_TOLERANCE_SHARE * self.rtt_wanted_ms) + self.jitter_wanted_ms
        if abs(self.rtt_ms - self.rtt_wanted_ms) > allowed_ms:
            found.append(
                f"{self.source}-{self.target}: RTT {self.rtt_ms:.2f} ms,"
                f" allowed {self.rtt_wanted_ms:g} ± {allowed_ms:.2f} ms"
            )
        if abs(self.goodput_mbps / self.goodput_wanted_mbps - 1) > RATE_TOLERANCE_SHARE:
            found.append(
                f"{self.source}-{self.target}: {self.goodput_mbps:.1f} Mbit/s of payload,"
                f" allowed {self.goodput_wanted_mbps:.1f} ± {100 * RATE_TOLERANCE_SHARE:g} %"
            )
        if self.mtu_kept is False:
            found.append(
                f"{self.source}-{self.target}: allowed is that IP packets of {self.mtu} bytes pass and larger"
                " ones do not, which is not so"
            )
        expected = self.packets * self.loss_wanted
        allowed = LOSS_SIGMAS * math.sqrt(expected * (1 - self.loss_wanted)) + 1
        if self.loss_wanted and abs(self.lost - expected) > allowed:
            found.append(
                f"{self.source}-{self.target}: {self.lost} of {self.packets} packets lost,"
                f" allowed {expected:.0f} ± {allowed:.0f}"
            )
        return found

    def row(self) -> dict[str, Any]:
        """As plain data for the record."""
        return {**asdict(self), "ok": not self.problems}


@dataclass(frozen=True)
class Probe:
    """Every measurement of every ordered pair of sites; a pair's last one counts."""

    measured: tuple[Measured, ...]
    seconds: float
    links: tuple[AccessMeasured, ...] = ()  # that no pair's measurement fills

    @property
    def pairs(self) -> tuple[Measured, ...]:
        """The measurement that counts, for each pair."""
        return tuple({(m.source, m.target): m for m in self.measured}.values())

    @property
    def problems(self) -> list[str]:
        """All that is off."""
        off = [problem for pair in self.pairs for problem in pair.problems]
        return off + [problem for link in self.links for problem in link.problems]


def _seconds_for(rate_mbps: float, rtt_ms: float) -> tuple[int, int]:
    """How long to measure and how much of the start to leave out: slow start takes some ten round trips."""
    omit = (1 if rtt_ms <= SHORT_RTT_MS else 2) + int(10 * rtt_ms / 1e3)
    return (1 if rate_mbps >= 100 else 3), omit


def batches(network_delays: tuple[DelayClass, ...], rates_mbps: list[float]) -> list[list[int]]:
    """Groups ordered pairs (by index) so that no two in a group share a site, within AT_ONCE_MBPS. Pure."""
    groups: list[list[int]] = []
    for index, delay in enumerate(network_delays):
        for group in groups:
            taken = {site for i in group for site in (network_delays[i].source, network_delays[i].target)}
            rate = sum(rates_mbps[i] for i in group) + rates_mbps[index]
            if not taken & {delay.source, delay.target} and rate <= AT_ONCE_MBPS:
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def _measure(network: Network, delay: DelayClass, rtt_ms: float, number: int) -> Measured:
    source, target = delay.source, delay.target
    one, other = _ends(network, delay)
    rate_mbps = network.now.rate_mbps(one, other)
    packets = lost = 0
    mtu = network.plan.mtu(source, target)
    mtu_kept = measure_mtu_kept(network, one, other, mtu) if delay.mtu else None
    if delay.loss:
        payload = udp_payload_bytes(mtu)
        possible = rate_mbps * payload / (payload + UDP_HEADER_BYTES) * (1 - delay.loss)
        _, packets, lost = measure_udp(
            network, one, other, rate_mbps=UDP_SHARE * rate_mbps, payload_bytes=payload
        )
        goodput, _, _ = measure_udp(
            network, one, other, rate_mbps=UDP_OVERLOAD * rate_mbps, payload_bytes=payload
        )
    else:
        possible = goodput_mbps(rate_mbps, mtu)
        seconds, omit = _seconds_for(rate_mbps, network.now.rtt_ms(source, target))
        goodput = measure_goodput_mbps(network, one, other, seconds=seconds, omit=omit)
    return Measured(
        source=source,
        target=target,
        rtt_wanted_ms=network.now.rtt_ms(source, target),
        rtt_ms=rtt_ms,
        rate_wanted_mbps=rate_mbps,
        goodput_wanted_mbps=possible,
        goodput_mbps=goodput,
        tries=number,
        jitter_wanted_ms=delay.jitter_ms,
        loss_wanted=delay.loss,
        packets=packets,
        lost=lost,
        cap_mbps=delay.cap_mbps,
        mtu=delay.mtu,
        mtu_kept=mtu_kept,
    )


def _ends(network: Network, delay: DelayClass) -> tuple[str, str]:
    """The nodes that measure a path: the first of each site that no event has taken down."""
    one, other = lit_node(network.now, delay.source), lit_node(network.now, delay.target)
    nodes_of = network.topology.nodes_of
    return one or nodes_of(delay.source)[0], other or nodes_of(delay.target)[0]


def _rtt_ms(network: Network, delay: DelayClass) -> float:
    return measure_rtt_ms(network, *_ends(network, delay))


def _measure_dark(network: Network, delay: DelayClass) -> Measured:
    """A path that is down keeps its promise by silence."""
    rtt_ms = network.now.rtt_ms(delay.source, delay.target)
    answers = count_answers(network, *_ends(network, delay), within_ms=rtt_ms + 2 * delay.jitter_ms)
    return Measured(
        source=delay.source,
        target=delay.target,
        rtt_wanted_ms=rtt_ms,
        rtt_ms=0.0,
        rate_wanted_mbps=0.0,
        goodput_wanted_mbps=0.0,
        goodput_mbps=0.0,
        answers=answers,
    )


def probe(network: Network) -> Probe:
    """Measures every ordered pair of sites between their first nodes, and what links they leave out.

    Paths that events have taken down must be silent. RTTs first, one pair of sites after the other; then rates, at
    once where paths share no link; then again, alone, what was off; then the links that no pair fills.
    """
    began = time.monotonic()
    delays = tuple(delay for delay in network.now.delays if not is_dark(network.now, delay))
    rtts: dict[frozenset[str], float] = {}
    for delay in delays:
        key = frozenset((delay.source, delay.target))
        if key not in rtts:
            rtts[key] = _rtt_ms(network, delay)
    rates = [network.now.wan_rate_mbps(delay.source, delay.target) for delay in delays]
    measured: list[Measured] = []
    for group in batches(delays, rates):
        with ThreadPoolExecutor(len(group)) as pool:
            measured += pool.map(
                lambda i: _measure(
                    network, delays[i], rtts[frozenset((delays[i].source, delays[i].target))], 1
                ),
                group,
            )
    for number in range(2, TRIES + 1):
        off = {(m.source, m.target) for m in Probe(tuple(measured), 0.0).pairs if m.problems}
        for delay in delays:
            if (delay.source, delay.target) in off:
                measured.append(_measure(network, delay, _rtt_ms(network, delay), number))
    measured += [_measure_dark(network, delay) for delay in network.now.delays if delay not in delays]
    links = tuple(measure_accesses(network))
    return Probe(tuple(measured), time.monotonic() - began, links)
