"""From events to changes in time: pure, so that two runs of the same topology meet the same weather.

An event unfolds into changes at offsets from the moment of its trigger. The schedule holds what is to come, hands
over what is due, and never looks at a clock itself.
"""

import heapq
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from testbed.events import kinds
from testbed.events.timing import Quartiles
from testbed.events.traces import play


@dataclass(frozen=True)
class SetRate:
    """A link gets a rate; None: the topology's own."""

    link: str
    rate_mbps: float | None


@dataclass(frozen=True)
class SetPath:
    """One figure of the path between two sites, both ways; None: the topology's own."""

    pair: tuple[str, str]
    what: Literal["rtt_ms", "jitter_ms", "loss"]
    value: float | None


@dataclass(frozen=True)
class CutOff:
    """Packets at a target are lost from now on, on behalf of the event ``holder``."""

    holder: int
    kind: Literal["site", "pair", "node", "link", "sites"]
    names: tuple[str, ...]


@dataclass(frozen=True)
class LetThrough:
    """Ends the cuts of one event (``holder``), or of whichever event at a target; with neither, all."""

    holder: int | None = None
    kind: Literal["site", "pair", "node", "link"] | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class OnNode:
    """Something that is done to the programs of a node."""

    verb: Literal["kill", "restart", "freeze", "thaw"]
    node: str


Change = SetRate | SetPath | CutOff | LetThrough | OnNode


@dataclass(frozen=True)
class Step:
    """Changes that belong together, ``after_s`` seconds after their event's trigger."""

    after_s: float
    text: str
    changes: tuple[Change, ...]
    lasts_s: float | None = None  # of what stands in the way of programs; None: until something else ends it


def draw(quartiles: Quartiles, key: str) -> float:
    """One value whose quartiles are the given ones, evenly spread between neighbours; the same key, the same value."""
    u = 4 * random.Random(key).random()
    quarter = min(3, int(u))
    return round(quartiles[quarter] + (quartiles[quarter + 1] - quartiles[quarter]) * (u - quarter), 3)


def _rate_changes(event: kinds.RateEvent, number: int, turn: int) -> tuple[list[SetRate], str]:
    up, down = event.up_mbps, event.down_mbps
    if event.rate_quartiles_mbps:
        up = down = draw(event.rate_quartiles_mbps, f"{event.seed}/{number}/{turn}")
    elif event.rate_mbps is not None:
        up = down = event.rate_mbps
    if event.link:
        return [SetRate(event.link, up)], f"rate of {event.link}: {up:g} Mbit/s"
    sides = [
        (f"{event.site}/{side}", rate) for side, rate in (("up", up), ("down", down)) if rate is not None
    ]
    rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(rate for _, rate in sides))
    text = f"rate of {' and '.join(link for link, _ in sides)}: {rates} Mbit/s"
    return [SetRate(link, rate) for link, rate in sides], text


def _rtt_changes(event: kinds.RttEvent, number: int, turn: int) -> tuple[list[SetPath], str]:
    rtt = event.rtt_ms
    if event.rtt_quartiles_ms:
        rtt = draw(event.rtt_quartiles_ms, f"{event.seed}/{number}/{turn}")
    changes, said = [], []
    if rtt is not None:
        changes.append(SetPath(event.pair, "rtt_ms", rtt))
        said.append(f"{rtt:g} ms")
    if event.jitter_ms is not None:
        changes.append(SetPath(event.pair, "jitter_ms", event.jitter_ms))
        said.append(f"jitter {event.jitter_ms:g} ms")
    return changes, f"RTT {' – '.join(event.pair)}: {', '.join(said)}"


def _undone(changes: Sequence[SetRate | SetPath]) -> tuple[Change, ...]:
    return tuple(
        SetRate(c.link, None) if isinstance(c, SetRate) else SetPath(c.pair, c.what, None) for c in changes
    )


def _figures(event: kinds.AnyEvent, number: int, turn: int) -> Iterator[Step]:
    changes: list[SetRate] | list[SetPath]
    if isinstance(event, kinds.RateEvent):
        changes, text = _rate_changes(event, number, turn)
    elif isinstance(event, kinds.RttEvent):
        changes, text = _rtt_changes(event, number, turn)
    elif isinstance(event, kinds.LossEvent):
        changes = [SetPath(event.pair, "loss", event.loss)]
        text = f"loss {' – '.join(event.pair)}: {100 * event.loss:g} %"
    else:
        raise TypeError(f"{event!r} sets no figure")
    yield Step(0.0, text, tuple(changes))
    if event.for_s is not None:
        yield Step(event.for_s, f"{text.partition(':')[0]} as before", _undone(changes))


def _trace(event: kinds.TraceEvent) -> Iterator[Step]:
    for t, rate in play(event.points or [], loop=event.loop):
        if event.for_s is not None and t >= event.for_s:
            break
        yield Step(t, f"trace on {event.link}: {rate:.4g} Mbit/s", (SetRate(event.link, rate),))
    if event.for_s is not None:
        yield Step(event.for_s, f"trace on {event.link} ends", (SetRate(event.link, None),))


def _cuts(event: kinds.DownEvent | kinds.FlapEvent | kinds.PartitionEvent, number: int) -> Iterator[Step]:
    if isinstance(event, kinds.PartitionEvent):
        target, cut = (
            f"partition around {', '.join(event.sites)}",
            CutOff(number, "sites", tuple(event.sites)),
        )
    else:
        target, cut = event.target, CutOff(number, event.kind, event.names)
    mend: tuple[Change, ...] = (LetThrough(holder=number),)
    healed = "over" if isinstance(event, kinds.PartitionEvent) else "up again"
    fell = "begins" if isinstance(event, kinds.PartitionEvent) else "down"
    if not isinstance(event, kinds.FlapEvent):
        yield Step(0.0, f"{target} {fell}", (cut,), event.for_s)
        if event.for_s is not None:
            yield Step(event.for_s, f"{target} {healed}", mend)
        return
    for k in itertools.count():
        start = k * event.period_s
        if event.for_s is not None and start >= event.for_s:
            return
        end = start + event.down_s if event.for_s is None else min(start + event.down_s, event.for_s)
        yield Step(start, f"{target} down", (cut,), end - start)
        yield Step(end, f"{target} {healed}", mend)


def unfold(event: kinds.AnyEvent, number: int, turn: int = 0) -> Iterator[Step]:
    """The changes of one happening of an event, in time order; ``number`` is its place in the list, from 1.

    ``turn`` counts the happenings of a repeated event: drawn values depend on it, on the event's seed and place.
    """
    if isinstance(event, kinds.RateEvent | kinds.RttEvent | kinds.LossEvent):
        yield from _figures(event, number, turn)
    elif isinstance(event, kinds.TraceEvent):
        yield from _trace(event)
    elif isinstance(event, kinds.DownEvent | kinds.FlapEvent | kinds.PartitionEvent):
        yield from _cuts(event, number)
    elif isinstance(event, kinds.UpEvent):
        change = LetThrough(kind=event.kind, names=event.names) if event.targets() else LetThrough()
        yield Step(0.0, event.text, (change,))
    elif isinstance(event, kinds.FreezeEvent):
        yield Step(0.0, f"freeze {event.node}", (OnNode("freeze", event.node),), event.for_s)
        if event.for_s is not None:
            yield Step(event.for_s, f"thaw {event.node}", (OnNode("thaw", event.node),))
    else:
        yield Step(0.0, event.text, (OnNode(event.do, event.node),))


@dataclass(frozen=True, order=True)
class Due:
    """A step with its time: ``at_s`` since the clock's zero. Steps of one moment keep the order of the list."""

    at_s: float
    event: int
    turn: int
    step: Step = field(compare=False)


@dataclass
class Progress:
    """How far the programs are: steps and rounds completed."""

    step: int = 0
    round: int = 0


class Schedule:
    """What is to come. All times are seconds since the zero of ``at_s``."""

    def __init__(self, events: Sequence[kinds.AnyEvent]) -> None:
        self._events = list(events)
        self._heap: list[tuple[Due, int, Iterator[Due]]] = []
        self._sequence = itertools.count()
        self._begun: set[int] = set()
        self._waiting = {
            n: e for n, e in enumerate(self._events, 1) if e.at_step is not None or e.at_round is not None
        }
        for number, event in enumerate(self._events, 1):
            if number not in self._waiting:
                first = event.at_s if event.at_s is not None else event.every_s or 0.0
                self._push(self._happenings(event, number, first))

    def _happenings(self, event: kinds.AnyEvent, number: int, first_s: float) -> Iterator[Due]:
        turns = range(event.times or 1) if event.every_s is None or event.times else itertools.count()
        for turn in turns:
            start = first_s + turn * (event.every_s or 0.0)
            for step in unfold(event, number, turn):
                yield Due(start + step.after_s, number, turn, step)

    def _push(self, coming: Iterator[Due]) -> None:
        due = next(coming, None)
        if due is not None:
            heapq.heappush(self._heap, (due, next(self._sequence), coming))

    @property
    def awaits_progress(self) -> bool:
        """Whether an event still waits for a step or a round."""
        return bool(self._waiting)

    def reached(self, progress: Progress, now_s: float) -> None:
        """Lets begin what waited for a step or a round that is completed."""
        for number, event in list(self._waiting.items()):
            by_step = event.at_step is not None and progress.step >= event.at_step
            by_round = event.at_round is not None and progress.round >= event.at_round
            if by_step or by_round:
                del self._waiting[number]
                self._push(self._happenings(event, number, now_s))

    def next_s(self) -> float | None:
        """When the next step is due; None when nothing is to come (or only what waits for progress)."""
        return self._heap[0][0].at_s if self._heap else None

    def due(self, now_s: float) -> Iterator[Due]:
        """Hands over, in order, what is due by now."""
        while self._heap and self._heap[0][0].at_s <= now_s:
            due, _, coming = heapq.heappop(self._heap)
            self._push(coming)
            self._begun.add(due.event)
            yield due

    def will_restart(self, node: str) -> bool:
        """Whether the node's programs are still to be started again."""
        numbers = {due.event for due, _, _ in self._heap} | set(self._waiting)
        events = [self._events[number - 1] for number in numbers]
        return any(isinstance(e, kinds.NodeEvent) and (e.do, e.node) == ("restart", node) for e in events)

    def not_reached(self) -> list[int]:
        """Numbers of the events of which nothing has happened yet."""
        return [n for n in range(1, len(self._events) + 1) if n not in self._begun]
