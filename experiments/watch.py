"""Looks at a run twice a second while it goes on."""

import time

from experiments import series
from experiments.evidence import Evidence
from testbed.counters import Counters
from testbed.errors import NetworkBroke

SAMPLE_EVERY_S = 0.5


class Watch:
    """Samples the links twice a second and reports how far the training is."""

    def __init__(self, evidence: Evidence, counters: Counters | None = None) -> None:
        last_stage = evidence.config.parallel.stages - 1
        self._file = evidence.run_dir / "ranks" / f"rank-{last_stage}.steps.jsonl"
        self._evidence, self._counters = evidence, counters
        self._due = 0.0
        self._told = 0
        self._traces: set[tuple[int, int]] = set()  # of a trace only the first change is told

    def sent_bytes(self) -> dict[str, int]:
        """Node -> bytes out of it, from the latest sample."""
        latest = self._evidence.samples[-64:]
        return {reading.link: reading.tx_bytes for reading in latest}

    def poll(self) -> None:
        """To be called often; does something every half second."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + SAMPLE_EVERY_S
        self._tell_events()
        network = self._evidence.network
        if network is not None and not network.delay_alive():
            raise NetworkBroke("the delay line died during the run: its links went dark")
        if self._counters:
            self._evidence.samples += self._counters.read().values()
        step = series.last_line(self._file)
        facts = {"steps": self._evidence.config.train.steps, "elapsed_s": now - self._evidence.launched}
        self._evidence.progress("train", {**facts, **(step or {})})

    def _tell_events(self) -> None:
        happened = self._evidence.events.happened if self._evidence.events else []
        for one in happened[self._told :]:
            if not (one.do == "trace" and (one.event, one.turn) in self._traces):
                self._evidence.progress("event", {"text": str(one), **one.row(self._evidence.launched)})
            self._traces.add((one.event, one.turn))
        self._told = len(happened)
