"""Captures hold what the link sent; live rates are those of the link."""

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import host
import pandas as pd
import pytest
import yaml
from test_runs import SMALL

from testbed.capture import SNAP_BYTES, Capture
from testbed.counters import Counters
from testbed.network import Network
from testbed.topology import load_topology

HEADERS = 66  # Ethernet 14, IP 20, TCP 20, timestamps 12
PAYLOAD = 1448
BYTES = 20_000_000
SEND = (
    f"import socket; s = socket.create_connection(('10.2.1.2', 7000)); s.sendall(bytes({BYTES})); s.close()"
)
RECEIVE = """
import socket
server = socket.create_server(('10.2.1.2', 7000))
print('listening', flush=True)
peer, _ = server.accept()
while peer.recv(1 << 20):
    pass
"""


def read_pcap(path: Path) -> list[tuple[float, int, bytes]]:
    """(time, length on the wire, what was kept) of every packet, by the format's definition."""
    data = path.read_bytes()
    magic, _, _, _, _, snap, link_type = struct.unpack_from("<IHHiIII", data)
    assert (magic, link_type) == (0xA1B2C3D4, 1)  # microseconds, Ethernet
    assert snap == SNAP_BYTES
    packets, at = [], 24
    while at < len(data):
        seconds, microseconds, kept, length = struct.unpack_from("<IIII", data, at)
        packets.append((seconds + microseconds / 1e6, length, data[at + 16 : at + 16 + kept]))
        at += 16 + kept
    return packets


def segments(length: int) -> int:
    """How many packets a captured one was on the wire."""
    return max(1, math.ceil((length - HEADERS) / PAYLOAD))


def test_a_capture_holds_every_packet_that_the_link_counted(tmp_path):
    with Network(load_topology("two-sites-1gbps")) as network, Counters(network) as counters:

        def program(node: str, script: str) -> subprocess.Popen:
            command = [sys.executable, "-c", script]
            return network.nodes[node].start_program(command, network.user, {}, subprocess.PIPE, Path("/"))

        receiver = program("south-0", RECEIVE)
        assert receiver.stdout.readline() == "listening\n"
        with Capture(network, "north/up", tmp_path) as capture:
            before = counters.read()["north/up"]
            program("north-0", SEND).wait(timeout=20)
            receiver.wait(timeout=20)
            after = counters.read()["north/up"]
    packets = read_pcap(capture.path)
    assert (capture.captured, capture.lost) == (len(packets), 0)
    assert len(packets) < after.tx_packets - before.tx_packets, "super-packets are one packet here"
    # a few packets of IPv6's own, within the counters' interval and outside the capture's, or the reverse
    assert sum(segments(n) for _, n, _ in packets) == pytest.approx(
        after.tx_packets - before.tx_packets, abs=4
    )
    with_headers = sum(n + HEADERS * (segments(n) - 1) for _, n, _ in packets)
    assert with_headers == pytest.approx(after.tx_bytes - before.tx_bytes, abs=4 * 90)
    assert all(len(kept) == min(SNAP_BYTES, n) for _, n, kept in packets)
    first, last = packets[0][0], packets[-1][0]
    assert 8 * with_headers / (last - first) < 1.02e9  # taken behind the shaper: its times are the link's


def test_an_unknown_link_is_refused_with_the_ones_there_are(tmp_path):
    for command in (["up", "two-sites-1gbps"], ["exec", "two-sites-1gbps"]):
        refused = host.dilocox(
            *command, "--pcap", "north/upp", *(["--", "true"] if command[0] == "exec" else [])
        )
        assert refused.returncode == 2
        assert "--pcap: found 'north/upp', allowed: north-0, north-0/down," in refused.stderr
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(SMALL))
    refused = host.dilocox("run", str(run_file), "-o", str(tmp_path / "run"), "--pcap", "nowhere")
    assert refused.returncode == 2
    assert not (tmp_path / "run").exists()
    refused = host.dilocox(
        "run", str(run_file), "-o", str(tmp_path / "run"), "--pcap", "north/up", "--set", "topology=loopback"
    )
    assert refused.returncode == 2
    assert "allowed: an emulated one" in refused.stderr


def test_a_runs_capture_lies_in_its_folder_belongs_to_its_user_and_is_in_the_record(tmp_path):
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump({**SMALL, "train": {**SMALL["train"], "steps": 3}}))
    done = subprocess.run(
        [*host.DILOCOX, "run", str(run_file), "-o", str(tmp_path / "run"), "--pcap", "north/up"],
        env={**os.environ, "SUDO_UID": "12345", "SUDO_GID": "12345"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    file = tmp_path / "run" / "north-up.pcap"
    assert file.stat().st_uid == 12345
    packets = read_pcap(file)
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["captures"] == [
        {
            "link": "north/up",
            "file": file.name,
            "snap_bytes": SNAP_BYTES,
            "packets": len(packets),
            "lost_packets": 0,
        }
    ]
    links = pd.read_parquet(tmp_path / "run" / "links.parquet")
    sent = links[links.link == "north/up"].tx_bytes
    on_wire = sum(n + HEADERS * (segments(n) - 1) for _, n, _ in packets)
    # the samples lie within the capture, but for a packet of IPv6's own at either end
    assert sent.iloc[-1] - sent.iloc[0] <= on_wire + 4 * 90


def test_a_network_that_is_up_is_captured_into_the_current_folder_until_it_goes(tmp_path):
    process = host.start("up", "two-sites-1gbps", "--pcap", "north/up", cwd=tmp_path)
    assert "is up" in process.stdout.readline()
    seconds = host.stop(process)
    told = process.stdout.read()
    process.stdout.close()
    assert seconds < 5
    packets = read_pcap(tmp_path / "north-up.pcap")
    assert f"{len(packets)} packets in {tmp_path}/north-up.pcap, none was lost by the capture" in told


def test_top_shows_from_another_process_what_a_link_carries(tmp_path):
    assert json.loads(host.dilocox("top", "--json", "--every", "0.1").stdout) == []
    script = "sh docs/examples/iperf3.sh -t 8".split()
    process = host.start("exec", "two-sites-1gbps", "--node", "north-0", "--node", "south-0", "--", *script)
    try:
        rates = {}

        def busy() -> bool:
            found = json.loads(host.dilocox("top", "--json", "--every", "1").stdout)
            rates.update({row["link"]: row for row in found})
            return bool(found) and rates["south/up"]["rate_mbps"] > 950

        host.wait_for(busy, 30, "a busy uplink")
        shown = host.dilocox("top", "--once").stdout
    finally:
        host.stop(process)
    process.stdout.close()
    assert rates["south/up"]["rate_mbps"] == pytest.approx(1000, rel=0.05)
    assert rates["north/down"]["rate_mbps"] == pytest.approx(rates["south/up"]["rate_mbps"], rel=0.1)
    per_packet = rates["south/up"]["rate_mbps"] * 1e6 / 8 / rates["south/up"]["packets_per_s"]
    assert per_packet == pytest.approx(1514, rel=0.01)
    assert 0 < rates["north/up"]["rate_mbps"] < 50  # acknowledgements
    assert rates["north-1"]["rate_mbps"] < 0.1  # ARP
    assert "two-sites-1gbps, session" in shown
    assert "south/up" in shown
