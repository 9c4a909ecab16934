"""Single measurements between two nodes: RTT by ping, TCP and UDP rate by iperf3."""

import json
import re
import statistics
import subprocess
import time
from typing import Any

from testbed.errors import TestbedError
from testbed.network import Network

PINGS = 15
PING_INTERVAL_S = 0.02
IPERF_PORT = 5201
START_TIMEOUT_S = 5.0
REALTIME = ("chrt", "-f", "40")
"""Measuring must not wait for the processor: a receiver that is late loses UDP packets that the link did not."""
UDP_PAYLOAD_BYTES = 1448
UDP_WIRE_BYTES = UDP_PAYLOAD_BYTES + 42  # Ethernet 14, IP 20, UDP 8
_PING_TIME = re.compile(r"time=([\d.]+) ms")


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
    network: Network,
    source: str,
    target: str,
    *,
    seconds: int = 1,
    omit: int = 1,
    port: int = IPERF_PORT,
    realtime: bool = True,
) -> float:
    """TCP payload rate from one node to another by iperf3, in Mbit/s, its start-up left out.

    ``realtime=False`` where many measure at once: they would starve the kernel's own network threads.
    """
    result = _iperf(
        network,
        source,
        target,
        port=port,
        options=["-t", str(seconds), "-O", str(omit)],
        seconds=seconds + omit,
        priority=REALTIME if realtime else (),
    )
    return float(result["end"]["sum_received"]["bits_per_second"]) / 1e6


def _iperf(
    network: Network,
    source: str,
    target: str,
    *,
    port: int,
    options: list[str],
    seconds: int,
    priority: tuple[str, ...] = REALTIME,
) -> dict[str, Any]:
    """Runs iperf3 once between two nodes; its JSON."""
    address = network.plan.node_address[target]
    server = network.nodes[target].start_root(
        [*priority, "iperf3", "-s", "-1", "-B", address, "-p", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    command = [
        *priority,
        "iperf3",
        "-J",
        "-c",
        address,
        "-p",
        str(port),
        "--connect-timeout",
        "5000",
        *options,
    ]
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
    end = _iperf(network, source, target, port=IPERF_PORT, options=options, seconds=seconds + 1)["end"]
    received_mbps = float(end["sum_received"]["bits_per_second"]) / 1e6  # by the receiver's clock
    return received_mbps, int(end["sum"]["packets"]), int(end["sum"]["lost_packets"])


def _wait_listening(network: Network, node: str, port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while f":{port} " not in network.nodes[node].run(["ss", "-tlnH"]):
        if time.monotonic() > deadline:
            raise TestbedError(f"{node}: iperf3 does not listen within {START_TIMEOUT_S:g} s")
        time.sleep(0.02)
