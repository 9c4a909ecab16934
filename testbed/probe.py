"""Measures every WAN pair and compares it with the topology: no result may exist over a link that is off."""

import json
import math
import re
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from typing import Any

from testbed.errors import TestbedError
from testbed.network import Network
from testbed.units import goodput_mbps

RTT_TOLERANCE_MS = 1.0
RTT_TOLERANCE_SHARE = 0.02
RATE_TOLERANCE_SHARE = 0.03
LOSS_SIGMAS = 4.0
"""A binomial count lies outside so many standard deviations once in 16,000 measurements."""
UDP_PAYLOAD_BYTES = 1448
UDP_WIRE_BYTES = UDP_PAYLOAD_BYTES + 42  # Ethernet 14, IP 20, UDP 8
UDP_SHARE = 0.5
"""Loss is measured at this share of the rate, where no queue overflows."""
UDP_OVERLOAD = 1.1
"""The rate of a lossy link is what arrives when so much of it is sent: TCP there is slow for its own reasons."""
PINGS = 15
PING_INTERVAL_S = 0.02
TRIES = 3
"""A second's hiccup of the machine is measured again; a link that is really off stays off. All tries are kept."""
IPERF_PORT = 5201
START_TIMEOUT_S = 5.0
_PING_TIME = re.compile(r"time=([\d.]+) ms")


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

    @property
    def problems(self) -> list[str]:
        """What is off, as sentences; empty when the link keeps its promise."""
        found = []
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

    @property
    def pairs(self) -> tuple[Measured, ...]:
        """The measurement that counts, for each pair."""
        return tuple({(m.source, m.target): m for m in self.measured}.values())

    @property
    def problems(self) -> list[str]:
        """All that is off."""
        return [problem for pair in self.pairs for problem in pair.problems]


def measure_rtt_ms(network: Network, source: str, target: str) -> float:
    """Median round-trip time between two nodes by ``ping``, in ms; the delay acts in a router, so the kernel times it whole."""
    timeout_s = (
        5
        + PINGS * PING_INTERVAL_S
        + 2 * network.topology.rtt_ms(network.topology.nodes[source], network.topology.nodes[target]) / 1e3
    )
    command = ["ping", "-n", "-c", str(PINGS), "-i", str(PING_INTERVAL_S), "-w", str(int(timeout_s))]
    out = network.nodes[source].run([*command, network.plan.node_address[target]], timeout_s=timeout_s + 2)
    times = [float(t) for t in _PING_TIME.findall(out)]
    if len(times) < PINGS // 2:
        raise TestbedError(f"{source} to {target}: {len(times)} of {PINGS} pings came back")
    return statistics.median(times)


def measure_goodput_mbps(
    network: Network, source: str, target: str, *, seconds: int = 1, omit: int = 1, port: int = IPERF_PORT
) -> float:
    """TCP payload rate from one node to another by iperf3, in Mbit/s, its start-up left out."""
    result = _iperf(
        network,
        source,
        target,
        port=port,
        options=["-t", str(seconds), "-O", str(omit)],
        seconds=seconds + omit,
    )
    return float(result["end"]["sum_received"]["bits_per_second"]) / 1e6


def _iperf(
    network: Network, source: str, target: str, *, port: int, options: list[str], seconds: int
) -> dict[str, Any]:
    """Runs iperf3 once between two nodes; its JSON."""
    address = network.plan.node_address[target]
    server = network.nodes[target].start_root(
        ["iperf3", "-s", "-1", "-B", address, "-p", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    command = ["iperf3", "-J", "-c", address, "-p", str(port), "--connect-timeout", "5000", *options]
    try:
        _wait_listening(network, target, port)
        out = network.nodes[source].run(command, timeout_s=seconds + 20)
    finally:
        server.kill()
        server.wait()
    result: dict[str, Any] = json.loads(out)
    if "error" in result:
        raise TestbedError(f"{source} to {target}: iperf3: {result['error']}")
    return result


def measure_udp(
    network: Network, source: str, target: str, *, rate_mbps: float, seconds: int = 3
) -> tuple[float, int, int]:
    """(payload Mbit/s received, packets sent, packets lost) when UDP is sent at a rate of layer 2, by iperf3."""
    offered_mbps = rate_mbps * UDP_PAYLOAD_BYTES / UDP_WIRE_BYTES
    options = [
        "-u",
        "-b",
        f"{offered_mbps:.6f}M",
        "-l",
        str(UDP_PAYLOAD_BYTES),
        "-t",
        str(seconds),
        "-O",
        "1",
    ]
    end = _iperf(network, source, target, port=IPERF_PORT, options=options, seconds=seconds + 1)["end"]["sum"]
    sent, lost = int(end["packets"]), int(end["lost_packets"])
    return (sent - lost) * UDP_PAYLOAD_BYTES * 8 / 1e6 / float(end["seconds"]), sent, lost


def _wait_listening(network: Network, node: str, port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while f":{port} " not in network.nodes[node].run(["ss", "-tlnH"]):
        if time.monotonic() > deadline:
            raise TestbedError(f"{node}: iperf3 does not listen within {START_TIMEOUT_S:g} s")
        time.sleep(0.02)


def _seconds_for(rate_mbps: float, rtt_ms: float) -> tuple[int, int]:
    """How long to measure and how much of the start to leave out: slow start takes some ten round trips."""
    omit = 1 + int(10 * rtt_ms / 1e3)
    return (1 if rate_mbps >= 100 else 3), omit


def probe(network: Network) -> Probe:
    """Measures every ordered pair of sites, one after the other, between the first nodes of the sites."""
    began = time.monotonic()
    topology = network.topology
    pairs = []
    first = {site: topology.nodes_of(site)[0] for site in topology.sites}
    rtts: dict[frozenset[str], float] = {}
    for delay in network.plan.delays:
        source, target = delay.source, delay.target
        key = frozenset((source, target))
        rate_mbps = topology.wan_rate_mbps(source, target)
        seconds, omit = _seconds_for(rate_mbps, topology.rtt_ms(source, target))
        for number in range(1, TRIES + 1):
            if key not in rtts or number > 1:
                rtts[key] = measure_rtt_ms(network, first[source], first[target])
            if delay.loss:
                possible = rate_mbps * UDP_PAYLOAD_BYTES / UDP_WIRE_BYTES * (1 - delay.loss)
                ends = (network, first[source], first[target])
                _, packets, lost = measure_udp(*ends, rate_mbps=UDP_SHARE * rate_mbps)
                goodput, _, _ = measure_udp(*ends, rate_mbps=UDP_OVERLOAD * rate_mbps)
            else:
                possible, packets, lost = goodput_mbps(rate_mbps, topology.mtu), 0, 0
                goodput = measure_goodput_mbps(
                    network, first[source], first[target], seconds=seconds, omit=omit
                )
            pairs.append(
                Measured(
                    source=source,
                    target=target,
                    rtt_wanted_ms=topology.rtt_ms(source, target),
                    rtt_ms=rtts[key],
                    rate_wanted_mbps=rate_mbps,
                    goodput_wanted_mbps=possible,
                    goodput_mbps=goodput,
                    tries=number,
                    jitter_wanted_ms=delay.jitter_ms,
                    loss_wanted=delay.loss,
                    packets=packets,
                    lost=lost,
                )
            )
            if not pairs[-1].problems:
                break
    return Probe(tuple(pairs), time.monotonic() - began)
