"""What a topology says of its nodes: limits, pace, and which runtime they live in. Never touches the kernel."""

import difflib
from collections.abc import Collection, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from testbed.validation import Strict

Runtime = Literal["namespace", "docker"]
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
    ``runtime``: ``namespace``, or ``docker`` with the name of an ``image`` and host folders (``mounts``) that its
    containers see read-only at the same path.
    """

    cpus: float | None = Field(default=None, ge=MIN_CPUS, le=4096)
    cpuset: str | None = Field(default=None, pattern=_CPUSET)
    memory_mb: int | None = Field(default=None, ge=MIN_MEMORY_MB)
    pace: float | None = Field(default=None, gt=0, le=1000)
    runtime: Runtime | None = None
    image: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$")] | None = None
    mounts: list[str] | None = None

    @field_validator("mounts")
    @classmethod
    def _absolute(cls, mounts: list[str] | None) -> list[str] | None:
        for path in mounts or []:
            if not path.startswith("/") or ":" in path:
                raise ValueError("allowed are absolute paths of folders on this machine, without ':'")
        return mounts

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
        return wider.model_copy(update=self.model_dump(exclude_none=True))


def settings_of(
    given: Mapping[str, NodeSettings], node: str, site: str, base: NodeSettings | None = None
) -> NodeSettings:
    """The settings of a node: its own over its site's over ``default`` over ``base``."""
    merged = base or NodeSettings()
    for name in (DEFAULT, site, node):
        if name in given:
            merged = given[name].over(merged)
    return merged


def check_settings(
    given: Mapping[str, NodeSettings], sites: Mapping[str, Collection[str]], base: NodeSettings
) -> None:
    """Refuses names of neither node nor site, names that mean two things, and runtimes that cannot be.

    Raises:
        ValueError: one sentence.
    """
    nodes = {node: site for site, names in sites.items() for node in names}
    for name in given:
        kinds = [name == DEFAULT, name in sites, name in nodes]
        if sum(kinds) == 0:
            allowed = [DEFAULT, *sites, *nodes]
            near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"nodes.{name}: unknown node; {hint}allowed are {DEFAULT!r}, a site or a node: {', '.join(allowed)}"
            )
        if sum(kinds) > 1 and not _site_of_that_one_node(name, sites):
            raise ValueError(
                f"nodes.{name}: found a name that is two things here"
                f" ({', '.join(w for w, is_it in zip(('the default', 'a site', 'a node'), kinds, strict=True) if is_it)});"
                " allowed is a name that is one: rename the site or the node"
            )
    for node, site in nodes.items():
        chosen = settings_of(given, node, site, base)
        if chosen.runtime == "docker" and chosen.image is None:
            raise ValueError(f"nodes.{node}.image: found nothing, allowed is an image's name: runtime is docker")
        if chosen.runtime != "docker" and (chosen.image is not None or chosen.mounts is not None):
            key = "image" if chosen.image is not None else "mounts"
            raise ValueError(f"nodes.{node}.{key}: found one without runtime: docker, allowed only with it")


def _site_of_that_one_node(name: str, sites: Mapping[str, Collection[str]]) -> bool:
    """A site and its only node may share a name: both readings are the same."""
    return name != DEFAULT and list(sites.get(name, ())) == [name]
