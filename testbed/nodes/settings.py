"""What a topology says of its nodes: limits and pace. Never touches the kernel."""

import difflib
from collections.abc import Collection, Mapping
from typing import Self

from pydantic import Field, model_validator

from testbed.linkmodel import Uplink
from testbed.validation import Strict

DEFAULT = "default"
MIN_CPUS = 0.05
"""The kernel takes no quota below 1 ms, and our period is 20 ms (testbed/nodes/cgroups.py)."""
MIN_MEMORY_MB = 16
_CPUSET = r"^\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*$"


class NodeSettings(Strict):
    """One node, all nodes of a site, or all nodes (``default``); what is left out comes from the wider one.

    ``cpus``: at most this many processors' worth of time (a quota). ``cpuset``: only these processors, as in
    ``0-3,6``. ``memory_mb``: at most this much memory (10^6 bytes, no swap), the private /tmp included; more is
    out of memory. ``pace``: factor on ``compute.step_s`` of a run, for hardware that differs: 2 is half as fast.
    ``uplink``, of single nodes only: the node's own link to the WAN, instead of ``node_uplink`` of its site or of the WAN.
    """

    uplink: Uplink | None = None
    cpus: float | None = Field(default=None, ge=MIN_CPUS, le=4096)
    cpuset: str | None = Field(default=None, pattern=_CPUSET)
    memory_mb: int | None = Field(default=None, ge=MIN_MEMORY_MB)
    pace: float | None = Field(default=None, gt=0, le=1000)

    @model_validator(mode="after")
    def _ranges_rise(self) -> Self:
        for part in (self.cpuset or "").split(","):
            first, _, last = part.partition("-")
            if last and int(last) < int(first):
                raise ValueError(f"cpuset: found {self.cpuset!r}, allowed are rising ranges such as 0-3,6")
        return self

    @property
    def limited(self) -> bool:
        """Whether any resource has a limit."""
        return self.cpus is not None or self.cpuset is not None or self.memory_mb is not None

    def over(self, wider: "NodeSettings") -> "NodeSettings":
        """These settings, with what they leave out taken from the wider ones."""
        return wider.model_copy(update={key: value for key, value in self if value is not None})


def settings_of(given: Mapping[str, NodeSettings], node: str, site: str) -> NodeSettings:
    """The settings of a node: its own over its site's over ``default``."""
    merged = NodeSettings()
    for name in (DEFAULT, site, node):
        if name in given:
            merged = given[name].over(merged)
    return merged


def check_settings(given: Mapping[str, NodeSettings], sites: Mapping[str, Collection[str]]) -> None:
    """Refuses names of neither node nor site, and names that mean two things.

    Raises:
        ValueError: one sentence.
    """
    nodes = {node: site for site, names in sites.items() for node in names}
    for name, settings in given.items():
        kinds = [name == DEFAULT, name in sites, name in nodes]
        if sum(kinds) == 0:
            allowed = [DEFAULT, *sites, *nodes]
            near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"nodes: found the unknown node {name!r}; {hint}allowed are {DEFAULT!r}, a site or a node: {', '.join(allowed)}"
            )
        if sum(kinds) > 1 and not _site_of_that_one_node(name, sites):
            raise ValueError(
                f"nodes.{name}: found a name that is two things here"
                f" ({', '.join(w for w, is_it in zip(('the default', 'a site', 'a node'), kinds, strict=True) if is_it)});"
                " allowed is a name that is one: rename the site or the node"
            )
        if settings.uplink is not None and name not in nodes:
            raise ValueError(
                f"nodes.{name}.uplink: found one for several nodes, allowed for a single node: use node_uplink of the"
                " site or of wan"
            )


def _site_of_that_one_node(name: str, sites: Mapping[str, Collection[str]]) -> bool:
    """A site and its only node may share a name: both readings are the same."""
    return name != DEFAULT and list(sites.get(name, ())) == [name]
