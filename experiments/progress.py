"""How far a run is: a live line on a terminal, a plain line every ten seconds otherwise."""

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.status import Status

PLAIN_EVERY_S = 10.0


class Reporter:
    """Receives a run's progress (see ``experiments.evidence.Progress``) and shows it."""

    def __init__(self, console: Console, label: str) -> None:
        self._console, self._label = console, label
        self._status: Status | None = console.status(label) if console.is_terminal else None
        self._last = 0.0
        self._what = ""

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status:
            self._status.stop()

    def __call__(self, what: str, facts: dict[str, Any]) -> None:
        """Shows the latest state."""
        text = f"{self._label}: {_describe(what, facts)}"
        if what == "event":  # stays on the screen, above the line that is rewritten
            self._console.print(text, soft_wrap=True)
            return
        if self._status:
            self._status.update(text)
            return
        now = time.monotonic()
        if what != self._what or now - self._last >= PLAIN_EVERY_S:
            self._what, self._last = what, now
            self._console.print(text, soft_wrap=True)


def _describe(what: str, facts: dict[str, Any]) -> str:
    if what == "up":
        return f"building {facts['topology']}"
    if what == "probe":
        return f"measuring {facts['pairs']} links"
    if what == "event":
        return str(facts["text"])
    if "step" not in facts:
        return f"starting, {facts['elapsed_s']:.0f} s"
    loss = f", loss {facts['loss']:.3f}" if facts.get("loss") is not None else ""
    remaining_s = facts["t"] / facts["step"] * (facts["steps"] - facts["step"])
    return f"step {facts['step']}/{facts['steps']}{loss}, about {remaining_s:.0f} s left"
