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
UDP_HEADER_BYTES = 42  # Ethernet 14, IP 20, UDP 8
PING_HEADER_BYTES = 28  # IP 20, ICMP 8
MTU_TRIES = 5
_PING_TIME = re.compile(r"time=([\d.]+) ms")


def measure_rtt_ms(network: Network, source: str, target: str) -> float:
    """Median round-trip time between two nodes by ``ping``, in ms; the delay acts in a router, so the kernel times it whole."""
    nodes = network.topology.nodes
    timeout_s = 5 + PINGS * PING_INTERVAL_S + 2 * network.now.rtt_ms(nodes[source], nodes[target]) / 1e3
    command = ["ping", "-n", "-c", str(PINGS), "-i", str(PING_INTERVAL_S), "-w", str(int(timeout_s))]
    out = network.nodes[source].run([*command, network.plan.node_address[target]], timeout_s=timeout_s + 2)
    times = [float(t) for t in _PING_TIME.findall(out)]
    if len(times) < PINGS // 2:
        raise TestbedError(f"{source} to {target}: {len(times)} of {PINGS} pings came back")
    return statistics.median(times)


def measure_mtu_kept(network: Network, source: str, target: str, mtu: int) -> bool:
    """Whether IP packets of ``mtu`` bytes that must not be fragmented pass, and those of one byte more do not."""
    return _passes(network, source, target, mtu) and not _passes(network, source, target, mtu + 1)


def _passes(network: Network, source: str, target: str, size: int) -> bool:
    """Whether one of MTU_TRIES pings of an IP size passes with the don't-fragment bit."""
    sites = network.topology.nodes
    wait_s = 1 + int(2 * network.now.rtt_ms(sites[source], sites[target]) / 1e3)
    command = ["ping", "-n", "-M", "do", "-i", "0.02", "-s", str(size - PING_HEADER_BYTES)]
    command += ["-c", str(MTU_TRIES), "-W", str(wait_s), network.plan.node_address[target]]
    # ping ends with 1 where nothing came back, and echoes are what is counted
    said = network.nodes[source].run(["sh", "-c", '"$@" || true', "sh", *command], timeout_s=wait_s + 10)
    return bool(_PING_TIME.search(said))


def count_answers(network: Network, source: str, target: str, *, within_ms: float) -> int:
    """How many of some pings come back to a node that is expected to hear nothing."""
    wait_s = 1 + int(within_ms / 1e3)
    command = ["ping", "-n", "-c", "5", "-i", "0.02", "-W", str(wait_s), network.plan.node_address[target]]
    # ping ends with 1 where nothing came back, and the answers are what is counted
    out = network.nodes[source].run(["sh", "-c", '"$@" || true', "sh", *command], timeout_s=wait_s + 10)
    return len(_PING_TIME.findall(out))


def measure_goodput_mbps(
    network: Network,
    source: str,
    target: str,
    *,
    seconds: int = 1,
    omit: int = 1,
    port: int = IPERF_PORT,
    realtime: bool = True,
    address: str | None = None,
) -> float:
    """TCP payload rate from one node to another by iperf3, in Mbit/s, its start-up left out.

    ``realtime=False`` where many measure at once: they would starve the kernel's own network threads.
    ``address``: of the target, where it is not a node (the core has one for each site).
    """
    result = _iperf(
        network,
        source,
        target,
        port=port,
        options=["-t", str(seconds), "-O", str(omit)],
        seconds=seconds + omit,
        priority=REALTIME if realtime else (),
        address=address,
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
    address: str | None = None,
) -> dict[str, Any]:
    """Runs iperf3 once between two nodes; its JSON."""
    address = address or network.plan.node_address[target]
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


def udp_payload_bytes(mtu: int) -> int:
    """UDP payload to measure with: what fits into one packet, at most a TCP segment's payload."""
    return min(UDP_PAYLOAD_BYTES, mtu - UDP_HEADER_BYTES + 14)


def measure_udp(
    network: Network,
    source: str,
    target: str,
    *,
    rate_mbps: float,
    seconds: int = 3,
    payload_bytes: int = UDP_PAYLOAD_BYTES,
) -> tuple[float, int, int]:
    """(payload Mbit/s received, packets sent, packets lost) when UDP is sent at a rate of layer 2, by iperf3."""
    offered_mbps = rate_mbps * payload_bytes / (payload_bytes + UDP_HEADER_BYTES)
    options = [
        "-u",
        "-b",
        f"{offered_mbps:.6f}M",
        "-l",
        str(payload_bytes),
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
