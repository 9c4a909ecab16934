"""Runs inside the virtual machine, as root, with the project's own Python: measures, and judges nothing.

``python inside.py RESULTS`` writes ``RESULTS/facts.json``; tests/vm/test_netem.py reads it outside and judges. A
part that fails leaves its traceback there as ``error``, so that the other parts are still told.
"""

import dataclasses
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "netns"))

import host

from testbed import doctor
from testbed.events.changes import State, apply
from testbed.events.live import Live
from testbed.events.schedule import Change, CutOff, LetThrough, SetPath, SetRate
from testbed.measure import count_answers, measure_goodput_mbps
from testbed.network import Network
from testbed.plan import CORE
from testbed.topology import Topology, topology_from

MECHANISMS: tuple[Literal["netem"], Literal["nfqueue"]] = ("netem", "nfqueue")
RATE_MBPS = 4.0
"""An emulated processor's timers come milliseconds late, and htb forgives only as much as its burst (two frames):
6 ms at 4 Mbit/s, but 1 ms from 24 Mbit/s on, where the VM reaches some 80 % of any rate."""
RTTS_MS = {
    "two": {"a b": 40.0},
    "three": {"a b": 10.0, "a c": 40.0, "b c": 100.0},  # 10 + 40 < 100: no delays per site add up to this
}
RATE_TOLERANCE_SHARE = 0.08
"""The probe allows 3 %; the rest is the emulation's, and the time that reading a counter takes there."""
EARLY_MS = 0.5
LATE_MS = {"netem": 4.0, "nfqueue": 8.0}
"""A late timer (for the delay line: a late process) makes an RTT longer, never shorter, so half a delay or one
way only is still found. Bare metal keeps 1 ms or 2 %."""
LOSS = {"b c": 0.1}  # of "three"; each way
LOSS_PINGS = 200
CHANGED = {"rtt_ms": 100.0, "rate_mbps": 2.0, "loss": 0.2}
"""What an event makes of "two"; loss each way."""
TRIES = 6
SECONDS = 3


def topology(name: str, mechanism: str) -> Topology:
    """Two or three sites; the uplinks send faster than the downlinks take, so that a queue grows in the core."""
    sites = sorted({site for pair in RTTS_MS[name] for site in pair.split()})
    data = {
        "name": name,
        "delay": mechanism,
        "sites": {site: {"nodes": 2 if name == "two" and site == "a" else 1} for site in sites},
        "wan": {
            "uplink": {"up_mbps": 2 * RATE_MBPS, "down_mbps": RATE_MBPS},
            "pairs": [
                {
                    "between": pair.split(),
                    "rtt_ms": rtt,
                    "loss": LOSS.get(pair, 0.0) if name == "three" else 0.0,
                }
                for pair, rtt in RTTS_MS[name].items()
            ],
        },
    }
    return topology_from(data, name)


def ping_ms(network: Network, source: str, target: str, count: int = 15) -> list[float]:
    """The round-trip times that came back."""
    command = ["ping", "-n", "-c", str(count), "-i", "0.01", "-W", "1", network.plan.node_address[target]]
    return [float(ms) for ms in re.findall(r"time=([\d.]+) ms", network.nodes[source].run(command))]


def best_rtt_ms(network: Network, pair: str) -> list[float]:
    """The fastest of each of up to TRIES rounds of ping; the last is the one that counts.

    Whatever keeps this machine busy only adds to a fixed delay, so the fastest is the nearest to it.
    """
    one, other = pair.split()
    fastest: list[float] = []
    while len(fastest) < TRIES:
        fastest.append(min(ping_ms(network, f"{one}-0", f"{other}-0")))
        if -EARLY_MS <= fastest[-1] - network.now.rtt_ms(one, other) <= LATE_MS[network.delay]:
            break
        time.sleep(1)
    return fastest


def qdiscs(network: Network) -> list[dict[str, Any]]:
    """The core's queues with their statistics."""
    shown: list[dict[str, Any]] = json.loads(network.nodes[CORE].run(["tc", "-s", "-j", "qdisc", "show"]))
    return shown


def flow(network: Network, pair: str) -> dict[str, float]:
    """Sends from one site to another and watches the core's egress there, from one second after the start.

    The rate is the kernel's own count of bytes by its own clock: iperf3's figures lose up to half when it is starved.
    ``rtt_ms`` is the fastest ping beside the flow, ``queue_bytes`` the most that was seen waiting in a bfifo.
    """
    one, other = pair.split()
    link = network.plan.link(f"{other}/down")
    ends = (network, f"{one}-0", f"{other}-0")
    sender = threading.Thread(
        target=measure_goodput_mbps, args=ends, kwargs={"seconds": SECONDS + 3, "omit": 0}
    )
    sender.start()
    time.sleep(2)
    readings, waiting, rtts = [], [], []
    for _ in range(3):
        began = time.monotonic()
        queues = [q for q in qdiscs(network) if q["dev"] == link.interface]
        readings.append(((began + time.monotonic()) / 2, next(q["bytes"] for q in queues if q.get("root"))))
        waiting.append(max(q["backlog"] for q in queues if q["kind"] == "bfifo"))
        if len(readings) < 3:
            rtts.append(min(ping_ms(network, *ends[1:])))
            time.sleep(max(0.0, began + SECONDS / 2 - time.monotonic()))
    sender.join()
    (first, before), _, (last, after) = readings
    rate_mbps = (after - before) * 8e-6 / (last - first)
    return {"rate_mbps": rate_mbps, "rtt_ms": max(rtts), "queue_bytes": max(waiting)}


def best_flow(network: Network, pair: str, wanted_mbps: float = RATE_MBPS) -> list[dict[str, float]]:
    """Up to TRIES flows; the last is the one that counts."""
    flows: list[dict[str, float]] = []
    while len(flows) < TRIES:
        flows.append(flow(network, pair))
        if abs(flows[-1]["rate_mbps"] / wanted_mbps - 1) <= RATE_TOLERANCE_SHARE:
            break
    return flows


def measure(name: str, mechanism: str) -> dict[str, Any]:
    """One network from start to end."""
    before = host.snapshot()
    began = time.monotonic()
    with Network(topology(name, mechanism)) as network:
        facts: dict[str, Any] = {"up_s": time.monotonic() - began, "delay": network.delay}
        facts["asked"] = [dataclasses.asdict(delay) for delay in network.plan.delays]
        facts["rtt_ms"] = {pair: best_rtt_ms(network, pair) for pair in RTTS_MS[name]}
        facts["flows"] = {"b a": best_flow(network, "b a")}
        facts["queue_wanted_bytes"] = network.plan.link("a/down").queue_bytes
        if name == "two":
            facts["flows"]["a b"] = best_flow(network, "a b")
            facts["lan_rtt_ms"] = min(ping_ms(network, "a-0", "a-1"))
            facts["lan_rate_mbps"] = measure_goodput_mbps(network, "a-0", "a-1", seconds=1, omit=0)
        else:
            facts["answered"] = {"b c": len(ping_ms(network, "b-0", "c-0", LOSS_PINGS))}
        facts["qdiscs"] = qdiscs(network)
        facts["rules"] = network.nodes[CORE].run([doctor.iptables_command(), "-t", "mangle", "-S", "FORWARD"])
        facts["delay_alive"] = network.delay_alive()
        began = time.monotonic()
    facts["down_s"] = time.monotonic() - began
    after = host.snapshot()
    facts["left"] = {what: [before[what], after[what]] for what in before if after[what] != before[what]}
    return facts


def change(mechanism: str) -> dict[str, Any]:
    """A network whose figures change while it is up: what is measured before, then, and after they are restored.

    Every change is read back by the code under test; a difference there is an error of this part.
    """
    changes: list[Change] = [
        SetPath(("a", "b"), "rtt_ms", CHANGED["rtt_ms"]),
        SetRate("a/down", CHANGED["rate_mbps"]),
        SetPath(("a", "b"), "loss", CHANGED["loss"]),
    ]
    undo: list[Change] = [
        SetPath(("a", "b"), "rtt_ms", None),
        SetRate("a/down", None),
        SetPath(("a", "b"), "loss", None),
    ]
    facts: dict[str, Any] = {}
    with Network(topology("two", mechanism)) as network, Live(network) as live:
        state = State(network.plan)

        def become(*now: Change) -> None:
            nonlocal state
            for one in now:
                state = apply(state, one, network.plan)
            live.follow(state.plan)

        facts["before_ms"] = best_rtt_ms(network, "a b")
        become(changes[0])
        facts["changed_ms"] = best_rtt_ms(network, "a b")
        become(changes[1])
        facts["changed_flows"] = best_flow(network, "b a", CHANGED["rate_mbps"])
        become(changes[2])
        facts["answered"] = len(ping_ms(network, "a-0", "b-0", LOSS_PINGS))
        become(*undo, CutOff(1, "pair", ("a", "b")))
        facts["dark"] = count_answers(network, "a-0", "b-0", within_ms=100)
        become(LetThrough())
        facts["after_ms"] = best_rtt_ms(network, "a b")
        facts["after_flows"] = best_flow(network, "b a", RATE_MBPS)
        facts["as_planned"] = network.now == network.plan
    return facts


def examine() -> dict[str, Any]:
    """What ``dilocox doctor`` finds, and what it chooses."""
    return {
        "checks": [dataclasses.asdict(check) for check in doctor.examine()],
        "chosen": {"auto": doctor.choose_delay("auto"), **{m: doctor.choose_delay(m) for m in MECHANISMS}},
    }


def main() -> int:
    """Each part in turn; what is known is written after each, so that a time-out keeps it."""
    parts: dict[str, Callable[[], dict[str, Any]]] = {"doctor": examine}
    parts |= {
        f"{name} {mechanism}": partial(measure, name, mechanism)
        for name in RTTS_MS
        for mechanism in MECHANISMS
    }
    parts |= {f"events {mechanism}": partial(change, mechanism) for mechanism in MECHANISMS}
    facts: dict[str, Any] = {"kernel": os.uname().release}
    for part, function in parts.items():
        began = time.monotonic()
        try:
            facts[part] = function()
        except Exception:
            facts[part] = {"error": traceback.format_exc()}
        facts[part]["seconds"] = time.monotonic() - began
        Path(sys.argv[1], "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
