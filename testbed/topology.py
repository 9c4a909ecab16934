"""What a WAN is, as plain data: sites, nodes, links. Never touches the kernel."""

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from testbed.errors import TopologyError
from testbed.events.checks import check_events
from testbed.events.kinds import Events
from testbed.events.traces import inline_traces
from testbed.linkmodel import MAX_MTU, MIN_MTU, Lan, Pair, Uplink, Wan
from testbed.nodes.settings import NodeSettings, check_settings, settings_of
from testbed.units import RATE_PATTERN
from testbed.validation import Strict, load_yaml, sentence

SHIPPED = Path(__file__).resolve().parent.parent / "topologies"
MAX_SITES = 200
MAX_NODES_PER_SITE = 200
_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")


class Site(Strict):
    """A cluster: ``nodes`` is a number (named ``site-0``, ``site-1``, ...) or a list of names."""

    nodes: int | list[str] = Field(default=1)
    lan: Lan = Lan()
    uplink: Uplink | None = None
    node_uplink: Uplink | None = None

    @field_validator("nodes")
    @classmethod
    def _some_nodes(cls, nodes: int | list[str]) -> int | list[str]:
        count = nodes if isinstance(nodes, int) else len(nodes)
        if not 1 <= count <= MAX_NODES_PER_SITE:
            raise ValueError(f"allowed are 1 to {MAX_NODES_PER_SITE} nodes in a site")
        for name in nodes if isinstance(nodes, list) else []:
            if not _NAME.fullmatch(name):
                raise ValueError("allowed in a node's name are a-z, 0-9 and '-', a letter first, 31 at most")
        return nodes


class Tcp(Strict):
    """TCP of every node: applied in its namespace, read back, recorded."""

    congestion_control: Literal["cubic", "bbr", "reno"] = "cubic"
    buffer_mb: float = Field(default=64, gt=0, le=1024)
    slow_start_after_idle: bool = False


class Topology(Strict):
    """A whole emulated WAN. Nodes are ordered site by site; that order is the order of ranks."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: str
    source: str = ""
    description: str = ""
    sites: dict[str, Site]
    wan: Wan | None = None
    delay: Literal["auto", "netem", "nfqueue"] = "auto"
    mtu: int = Field(default=1500, ge=MIN_MTU, le=MAX_MTU)
    tcp: Tcp = Tcp()
    node_settings: dict[str, NodeSettings] = Field(default_factory=dict, alias="nodes")
    events: Events = Field(default_factory=list)

    @field_validator("sites")
    @classmethod
    def _site_names(cls, sites: dict[str, Site]) -> dict[str, Site]:
        if not 1 <= len(sites) <= MAX_SITES:
            raise ValueError(f"allowed are 1 to {MAX_SITES} sites")
        for name in sites:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"site {name!r}: allowed in a name are a-z, 0-9 and '-', a letter first, 31 at most"
                )
        return sites

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        seen: dict[str, str] = {}
        for site in self.sites:
            for node in self.nodes_of(site):
                if node in seen:
                    raise ValueError(
                        f"sites.{site}.nodes: found the node name {node!r} which site {seen[node]!r} has too;"
                        " allowed is each name once in the whole topology"
                    )
                seen[node] = site
        check_settings(self.node_settings, {site: self.nodes_of(site) for site in self.sites})
        if len(self.sites) > 1:
            self._check_pairs()
        check_events(self.events, self)
        if self.delay == "netem" and self.jitters:
            raise ValueError(
                "delay: found netem together with jitter_ms, which reorders packets there; allowed: auto, nfqueue"
            )
        return self

    @property
    def jitters(self) -> bool:
        """Whether any path has jitter, now or by an event."""
        by_event = any(e.do == "rtt" and e.jitter_ms for e in self.events)
        return by_event or (any(pair.jitter_ms for pair in self.wan.pairs) if self.wan else False)

    @property
    def loses(self) -> bool:
        """Whether any path loses packets, now or by an event."""
        by_event = any(e.do == "loss" and e.loss for e in self.events)
        return by_event or (any(pair.loss for pair in self.wan.pairs) if self.wan else False)

    def _check_pairs(self) -> None:
        if self.wan is None:
            raise ValueError(
                f"wan: found nothing, allowed is a wan section: there are {len(self.sites)} sites"
            )
        given: set[frozenset[str]] = set()
        for pair in self.wan.pairs:
            for site in pair.between:
                if site not in self.sites:
                    raise ValueError(
                        f"wan.pairs: found the unknown site {site!r}; allowed: {', '.join(self.sites)}"
                    )
            key = frozenset(pair.between)
            if len(key) != 2:
                raise ValueError(f"wan.pairs: found {list(pair.between)}; allowed are two different sites")
            if key in given:
                raise ValueError(f"wan.pairs: found the pair {sorted(key)} twice, allowed once")
            given.add(key)
            if pair.mtu is not None and pair.mtu > self.mtu:
                raise ValueError(
                    f"wan.pairs: found mtu {pair.mtu} between {pair.between[0]} and {pair.between[1]};"
                    f" allowed is at most the topology's mtu ({self.mtu})"
                )
        for one, other in itertools.combinations(self.sites, 2):
            if frozenset((one, other)) not in given:
                raise ValueError(
                    f"wan.pairs: found no entry for {one} and {other}; allowed is one for every pair of sites"
                )

    def nodes_of(self, site: str) -> list[str]:
        """Names of a site's nodes, in rank order."""
        nodes = self.sites[site].nodes
        return [f"{site}-{k}" for k in range(nodes)] if isinstance(nodes, int) else list(nodes)

    @property
    def nodes(self) -> dict[str, str]:
        """Node name to site name, in rank order."""
        return {node: site for site in self.sites for node in self.nodes_of(site)}

    def settings(self, node: str) -> NodeSettings:
        """Limits and pace of a node: its own over its site's over ``default``."""
        return settings_of(self.node_settings, node, self.nodes[node])

    def uplink(self, site: str) -> Uplink:
        """The uplink of a site, its own or the WAN's default."""
        own = self.sites[site].uplink
        if own is not None:
            return own
        if self.wan is None:
            raise TopologyError(f"site {site} has no uplink: the topology has no wan section")
        return self.wan.uplink

    def node_uplink(self, node: str) -> Uplink | None:
        """The uplink that a node has for itself, beside the one that its site shares; None where it has none."""
        if node in self.node_settings and self.node_settings[node].uplink is not None:
            return self.node_settings[node].uplink
        site = self.sites[self.nodes[node]]
        return site.node_uplink or (self.wan.node_uplink if self.wan else None)

    def pair(self, one: str, other: str) -> Pair:
        """The path between two sites."""
        for pair in self.wan.pairs if self.wan else []:
            if set(pair.between) == {one, other}:
                return pair
        raise TopologyError(f"no pair of sites {one} and {other}")

    def rtt_ms(self, one: str, other: str) -> float:
        """Round-trip time asked for between two sites, in ms."""
        return self.sites[one].lan.rtt_ms if one == other else self.pair(one, other).rtt_ms


def topology_from(data: dict[str, Any], file: str) -> Topology:
    """Checks a mapping; raises TopologyError with one sentence that names the file and the key."""
    data = inline_traces(data, Path(file).parent)
    try:
        return Topology.model_validate(data)
    except ValidationError as error:
        raise TopologyError(sentence(error, Topology, file)) from error


def find_topology(name_or_path: str) -> Path:
    """Path of a topology given as a path or as the name of a shipped one."""
    path = Path(name_or_path)
    for candidate in (path, SHIPPED / f"{name_or_path}.yaml", SHIPPED.parent / path):
        if candidate.is_file():
            return candidate
    shipped = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.yaml")))
    raise TopologyError(
        f"{name_or_path}: found no such topology; allowed is a YAML file or one of: {shipped}"
    )


def load_topology(name_or_path: str | Path) -> Topology:
    """Reads and checks a topology file (or a shipped one by its name)."""
    path = find_topology(str(name_or_path))
    return topology_from(load_yaml(path), str(path))


def json_schema() -> dict[str, Any]:
    """JSON schema of a topology file, for editors that complete and check while one types."""
    schema = Topology.model_json_schema()
    number_or_unit = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": RATE_PATTERN}]}
    for definition in schema["$defs"].values():
        for name, field in definition.get("properties", {}).items():
            if name.endswith("_mbps") and "prefixItems" not in json.dumps(field):
                definition["properties"][name] = number_or_unit | {"title": field.get("title", name)}
    return schema


if __name__ == "__main__":
    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
