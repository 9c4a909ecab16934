"""Delay by NFQUEUE, for kernels without netem: iptables sends a pair's packets to the delay line's queue.

The rules stand in the mangle table's FORWARD chain of the core, never with ``--queue-bypass``: if the delay line
dies the links go dark, they do not go fast. Delay at the sender's own egress would count held packets against
its socket (TCP small queues), which is why it happens in a router.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from testbed.plan import NetworkPlan

MAX_PACKETS = 65_536


@dataclass(frozen=True)
class Queue:
    """One NFQUEUE number of the core, how long its packets wait (ms) and which share of them is lost."""

    number: int
    delay_ms: float
    jitter_ms: float
    loss: float
    source: str
    target: str


def queues(plan: NetworkPlan) -> list[Queue]:
    """One queue for each ordered pair of sites, so that no pair's packets wait behind another's."""
    return [
        Queue(n, delay.delay_ms, delay.jitter_ms, delay.loss, delay.source, delay.target)
        for n, delay in enumerate(plan.delays)
    ]


def rules(plan: NetworkPlan, iptables: str = "iptables") -> list[list[str]]:
    """iptables commands for the core."""
    return [
        [iptables, "-w", "5", "-t", "mangle", "-A", "FORWARD", "-i", delay.from_interface]
        + ["-o", delay.to_interface, "-j", "NFQUEUE", "--queue-num", str(queue.number)]
        for queue, delay in zip(queues(plan), plan.delays, strict=True)
    ]


def write_config(plan: NetworkPlan, path: Path) -> None:
    """What the delay line process reads at its start."""
    config = {
        "queues": {str(q.number): [q.delay_ms, q.jitter_ms, q.loss] for q in queues(plan)},
        "max_packets": MAX_PACKETS,
    }
    path.write_text(json.dumps(config), encoding="utf-8")
