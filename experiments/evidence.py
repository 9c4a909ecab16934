"""One run in progress: what was asked for, and what has been seen so far."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.config import RunConfig
from testbed.capture import Capture
from testbed.counters import Reading
from testbed.events.conductor import Conductor
from testbed.fidelity import Fidelity
from testbed.network import Network
from testbed.probe import Probe
from testbed.sockets import Flow

Progress = Callable[[str, dict[str, Any]], None]
"""Called with what is going on (``up``, ``probe``, ``train``, ...) and facts about it."""


def silent(_what: str, _facts: dict[str, Any]) -> None:
    """Nobody looks."""


@dataclass
class Evidence:
    """One run's request, and what it leaves behind beside the trainer's own files."""

    config: RunConfig
    run_dir: Path
    progress: Progress
    resume: bool = False
    pcap: tuple[str, ...] = ()

    status: str = "done"
    reasons: list[str] = field(default_factory=list)
    delay: str | None = None
    before: Probe | None = None
    after: Probe | None = None
    fidelity: Fidelity | None = None
    nodes: dict[str, Any] = field(default_factory=dict)  # limits, throttling and memory of limited nodes
    captures: list[Capture] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    first: dict[str, Reading] = field(default_factory=dict)
    last: dict[str, Reading] = field(default_factory=dict)
    samples: list[Reading] = field(default_factory=list)
    launched: float = 0.0  # monotonic
    launched_epoch: float = 0.0
    network: Network | None = None
    events: Conductor | None = None
    killed: list[str] = field(default_factory=list)
    """Nodes that an event killed and none started again."""
    seconds: dict[str, float] = field(default_factory=dict)


class Clock:
    """Names what the seconds of a run went into."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """Gives the time since the last lap to ``name``."""
        now = time.monotonic()
        self._seconds[name] = now - self._last
        self._last = now
