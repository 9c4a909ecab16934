"""Live link rates of the networks that are up: what ``dilocox top`` shows, from any terminal."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from testbed.attach import Attached, attach
from testbed.counters import Counters, Reading
from testbed.errors import TestbedError


@dataclass(frozen=True)
class Rate:
    """One direction of a link over the last interval, by the queueing discipline's counters (layer 2)."""

    session: str
    topology: str
    link: str
    rate_mbps: float
    packets_per_s: float
    limit_mbps: float
    backlog_bytes: int
    dropped_packets: int  # since the network came up


def rates(network: Attached, before: dict[str, Reading], after: dict[str, Reading]) -> list[Rate]:
    """What went over every link between two readings. Pure."""
    result = []
    for link in network.links:
        first, last = before[link.name], after[link.name]
        seconds = last.t - first.t
        result.append(
            Rate(
                session=network.session_id,
                topology=network.topology,
                link=link.name,
                rate_mbps=(last.tx_bytes - first.tx_bytes) * 8e-6 / seconds,
                packets_per_s=(last.tx_packets - first.tx_packets) / seconds,
                limit_mbps=link.rate_mbps,
                backlog_bytes=last.backlog,
                dropped_packets=last.dropped,
            )
        )
    return result


class Top:
    """Watches every network that is up; ones that come and go are noticed."""

    def __init__(self) -> None:
        if os.geteuid() != 0:
            raise TestbedError("reading the links of another process's network needs root: sudo dilocox top")
        self._stack = contextlib.ExitStack()
        self._watched: dict[str, tuple[Attached, Counters]] = {}
        self._before: dict[str, dict[str, Reading]] = {}

    def __enter__(self) -> "Top":
        self._stack.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._stack.__exit__(*details)

    def sample(self) -> list[tuple[Attached, list[Rate]]]:
        """The rates since the last call, of every network that was up then and still is."""
        up = {network.session_id: network for network in attach()}
        self._watched = {name: watched for name, watched in self._watched.items() if name in up}
        for name, network in up.items():
            if name not in self._watched:
                self._watched[name] = (network, self._stack.enter_context(Counters(network)))
        result, readings = [], {}
        for name, (network, counters) in self._watched.items():
            try:
                readings[name] = counters.read()
            except TestbedError:
                continue  # it went down this moment
            if name in self._before:
                result.append((network, rates(network, self._before[name], readings[name])))
        self._before = readings
        return result


def table(network: Attached, found: list[Rate]) -> Table:
    """One network's links, the busiest visible at a glance."""
    title = f"{network.topology}, session {network.session_id}, delays by {network.delay}"
    heads = ("link", "Mbit/s (layer 2)", "of its rate", "packets/s", "waiting kB", "dropped")
    shown = Table(*heads, box=None, title=title, title_justify="left")
    for column in shown.columns[1:]:
        column.justify = "right"
    for rate in found:
        shown.add_row(
            rate.link,
            f"{rate.rate_mbps:,.1f}",
            f"{100 * rate.rate_mbps / rate.limit_mbps:.0f} %",
            f"{rate.packets_per_s:,.0f}",
            f"{rate.backlog_bytes / 1e3:,.0f}",
            f"{rate.dropped_packets:,}",
        )
    return shown


def snapshot(every_s: float) -> list[tuple[Attached, list[Rate]]]:
    """The rates over one interval."""
    with Top() as top:
        top.sample()
        time.sleep(every_s)
        return top.sample()


def rows(found: list[tuple[Attached, list[Rate]]]) -> list[dict[str, Any]]:
    """As plain data, for scripts."""
    return [asdict(rate) for _, of_network in found for rate in of_network]


def _frames(every_s: float) -> Iterator[Group | str]:
    with Top() as top:
        top.sample()
        while True:
            time.sleep(every_s)
            found = top.sample()
            yield (
                Group(*(table(network, of_network) for network, of_network in found))
                if found
                else "no network is up"
            )


def watch(console: Console, every_s: float) -> None:
    """Shows the rates until Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        for frame in _frames(every_s):
            live.update(frame, refresh=True)
