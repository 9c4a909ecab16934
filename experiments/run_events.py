"""``events:`` of a run: added to those of its topology, or instead of them. The resolved run has them in its topology."""

from pathlib import Path
from typing import Any

from testbed.errors import TopologyError
from testbed.events.traces import inline_traces
from testbed.topology import find_topology, topology_from
from testbed.validation import load_yaml


def with_events(data: dict[str, Any], file: str) -> dict[str, Any]:
    """A run's mapping whose topology has the run's events; trace files are relative to the run's file.

    Args:
        data: the run, with ``events``: a list that is added, or ``{instead: [...]}``; its topology a mapping, a path
            or a name.
        file: where the run came from, for error sentences.

    Raises:
        TopologyError: events of a shape that is not allowed, or a run without a network to change.
    """
    asked, topology = data["events"], data.get("topology", "loopback")
    instead = isinstance(asked, dict) and list(asked) == ["instead"]
    events = asked["instead"] if instead else asked
    if not isinstance(events, list):
        raise TopologyError(
            f"{file}: events: found {asked!r}, allowed is a list of events, or {{instead: [...]}}"
        )
    if topology == "loopback":
        raise TopologyError(
            f"{file}: events: found {len(events)} with topology loopback, allowed is an emulated one"
        )
    source = f"{file}: topology"
    if isinstance(topology, str):
        path = find_topology(topology)
        topology, source = load_yaml(path), str(path)
    if not isinstance(topology, dict):
        raise TopologyError(
            f"{file}: topology: found {topology!r}, allowed is a topology's file, name or mapping"
        )
    base = topology_from(topology, source).model_dump(mode="json")  # its own mistakes are told as its own
    added = inline_traces({"events": events}, Path(file).parent)["events"]
    merged = {**base, "events": [*([] if instead else base["events"]), *added]}
    rest = {key: value for key, value in data.items() if key != "events"}
    topology_from(merged, f"{file}: topology with the run's events")
    return {**rest, "topology": merged}
