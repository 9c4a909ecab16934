"""A topology as a picture: sites around the WAN core, each link with its figures."""

import itertools
import math
import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from testbed.events.kinds import describe
from testbed.linkmodel import Lan, Uplink
from testbed.topology import Topology

MILLIMETRE = 1 / 25.4
SITE_COLOUR, LINK_COLOUR, PATH_COLOUR = "#0072B2", "#333333", "#999999"
MOST_NODES_DRAWN = 8
MOST_EVENTS_LISTED = 8


def _rate(mbps: float) -> str:
    return f"{mbps / 1000:g} Gbit/s" if mbps >= 1000 else f"{mbps:g} Mbit/s"


def _both(link: Lan | Uplink) -> str:
    if link.up == link.down:
        return _rate(link.up)
    return f"{link.up:g} ↑ {link.down:g} ↓ Mbit/s"


def draw(topology: Topology) -> Figure:
    """Sites on a circle with their nodes, uplinks to the core, and between every two sites the path's RTT."""
    figure = Figure(figsize=(120 * MILLIMETRE, 100 * MILLIMETRE), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_aspect("equal")
    sites = list(topology.sites)
    places = {
        site: (math.cos(angle), math.sin(angle))
        for i, site in enumerate(sites)
        for angle in [math.pi - 2 * math.pi * i / len(sites)]
    }
    if len(sites) == 1:
        places = {sites[0]: (0.0, 0.0)}
    for one, other in itertools.combinations(sites, 2):
        _path(topology, axes, one, other, places)
    for site, (x, y) in places.items():
        nodes = topology.nodes_of(site)
        lan = topology.sites[site].lan
        inside = _rate(lan.up) if lan.up == lan.down else f"{_both(lan)}"
        text = f"{site}\n{len(nodes)} node{'s' if len(nodes) > 1 else ''}, {inside} inside"
        if len(sites) > 1:
            text += f"\nuplink {_both(topology.uplink(site))}"
            own = dict.fromkeys(_both(link) for node in nodes if (link := topology.node_uplink(node)))
            text += "".join(f"\neach node {figures}" for figures in own)
        axes.text(
            x,
            y,
            text,
            ha="center",
            va="center",
            fontsize=7,
            color="white",
            bbox={"boxstyle": "round,pad=0.5", "facecolor": SITE_COLOUR, "edgecolor": "none"},
            zorder=3,
        )
    axes.set_xlim(-1.6, 1.6)
    axes.set_ylim(-1.35, 1.35)
    axes.set_title(topology.name, fontsize=9)
    _events(topology, axes)
    return figure


def _events(topology: Topology, axes: Axes) -> None:
    """What will change, below the picture."""
    lines = [describe(event) for event in topology.events]
    if len(lines) > MOST_EVENTS_LISTED:
        lines = [*lines[: MOST_EVENTS_LISTED - 1], f"and {len(lines) - MOST_EVENTS_LISTED + 1} more events"]
    if lines:
        text = "\n".join(textwrap.fill(line, 90, subsequent_indent="  ") for line in lines)
        axes.text(
            0.0, -0.02, text, transform=axes.transAxes, fontsize=6, va="top", ha="left", color=LINK_COLOUR
        )


def _path(
    topology: Topology, axes: Axes, one: str, other: str, places: dict[str, tuple[float, float]]
) -> None:
    (x0, y0), (x1, y1) = places[one], places[other]
    pair = topology.pair(one, other)
    axes.plot([x0, x1], [y0, y1], color=PATH_COLOUR, linewidth=1, zorder=1)
    text = f"{pair.rtt_ms:g} ms"
    if pair.jitter_ms:
        text += f" ± {pair.jitter_ms:g}"
    for event in topology.events:
        # a figure that is drawn anew stands for the first one, which is soon gone
        if event.do == "rtt" and set(event.pair) == {one, other} and event.rtt_quartiles_ms:
            _, lower, median, upper, _ = event.rtt_quartiles_ms
            text = f"{lower:g} – {median:g} – {upper:g} ms\n{event.when}"
    if pair.rate_mbps is not None:
        text += f"\n{_rate(pair.rate_mbps)}"
    if pair.mtu is not None:
        text += f"\nMTU {pair.mtu}"
    if pair.loss:
        text += f"\n{100 * pair.loss:g} % lost"
    crosses = len(places) > 3 and math.hypot(x1 - x0, y1 - y0) > 1.5
    along = 0.36 if crosses else 0.5  # long chords cross in the middle, where their labels would too
    axes.text(
        x0 + along * (x1 - x0),
        y0 + along * (y1 - y0),
        text,
        ha="center",
        va="center",
        fontsize=7,
        color=LINK_COLOUR,
        bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none"},
        zorder=2,
    )
