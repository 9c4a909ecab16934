"""A whole run as people write it: what to train, how to synchronise, over which network."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from experiments.errors import RequestError
from experiments.run_events import with_events
from testbed.errors import TopologyError
from testbed.topology import Topology, load_topology, topology_from
from testbed.validation import load_yaml
from trainer.config import PacedCompute, TrainerConfig
from trainer.config_errors import config_error_sentence
from trainer.data import DataError, evaluation_windows, load_corpus

LOOPBACK = "loopback"


class RunConfig(TrainerConfig):
    """A trainer's configuration with a name and a network; ``loopback`` needs neither root nor testbed."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    topology: Topology | Literal["loopback"] = "loopback"

    @model_validator(mode="after")
    def _check_survival_alone(self) -> "RunConfig":
        if self.parallel.on_replica_loss == "continue":
            raise ValueError(
                "parallel.on_replica_loss: found continue, allowed so far only with `python -m trainer` beside"
                " `python -m trainer.coordinator`"
            )
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks: replicas x data_parallel x stages."""
        return self.parallel.ranks

    def placement(self) -> list[str]:
        """Node of every rank. Replica i lives in site i (one site: all replicas there), its ranks on its nodes.

        Raises:
            RequestError: more ranks than nodes, or replicas that do not fit the sites.
        """
        if self.topology == LOOPBACK or isinstance(self.topology, str):
            return [f"rank-{rank}" for rank in range(self.world_size)]
        topology, replicas = self.topology, self.parallel.replicas
        each = self.world_size // replicas
        nodes = list(topology.nodes)
        if self.world_size > len(nodes):
            raise RequestError(
                f"parallel: found {replicas} replicas of {each} ranks = {self.world_size} ranks,"
                f" allowed are at most the {len(nodes)} nodes of topology {topology.name!r}"
            )
        if len(topology.sites) == 1:
            return nodes[: self.world_size]
        if replicas != len(topology.sites):
            raise RequestError(
                f"parallel.replicas: found {replicas}, allowed is one replica per site:"
                f" topology {topology.name!r} has {len(topology.sites)} sites"
            )
        small = [site for site in topology.sites if len(topology.nodes_of(site)) < each]
        if small:
            raise RequestError(
                f"parallel: found {each} ranks in a replica, allowed are at most the nodes of each site:"
                f" site {small[0]!r} of topology {topology.name!r} has {len(topology.nodes_of(small[0]))}"
            )
        return [node for site in topology.sites for node in topology.nodes_of(site)[:each]]

    def plain(self) -> dict[str, Any]:
        """Resolved and complete, as plain data: running it again is the same run."""
        return self.model_dump(mode="json")


def resolve_run(data: dict[str, Any], file: str, near: Path | None = None) -> RunConfig:
    """Checks a run's mapping; a topology given by path or name is read and becomes part of it.

    Args:
        data: the mapping as read from YAML.
        file: where it came from, for error sentences.
        near: a folder from which (and from whose parents) a relative topology path is tried too.

    Raises:
        RequestError: one sentence with file, key, found and allowed.
    """
    topology = data.get("topology", LOOPBACK)
    try:
        if "events" in data:
            located = _locate(topology, near) if isinstance(topology, str) else topology
            data = with_events({**data, "topology": located}, file)
            topology = data["topology"]
        if isinstance(topology, dict):
            topology = topology_from(topology, f"{file}: topology")
        elif isinstance(topology, str) and topology != LOOPBACK:
            topology = load_topology(_locate(topology, near))
        config = RunConfig.model_validate({**data, "topology": topology, **_absolute_paths(data)})
    except TopologyError as error:
        raise RequestError(str(error)) from error
    except ValidationError as error:
        raise RequestError(config_error_sentence(error, file, RunConfig)) from error
    try:
        placement = config.placement()
    except RequestError as error:
        raise RequestError(f"{file}: {error}") from error
    return _paced(config, placement, file)


def _paced(config: RunConfig, placement: list[str], file: str) -> RunConfig:
    """The nodes' pace becomes ``compute.pace``, a factor for each rank: the trainer knows no topology."""
    if not isinstance(config.topology, Topology):
        return config
    stated = [config.topology.settings(node).pace for node in placement]
    if all(factor is None for factor in stated):
        return config
    pace = tuple(1.0 if factor is None else factor for factor in stated)
    if not isinstance(config.compute, PacedCompute):
        raise RequestError(
            f"{file}: compute.mode: found real, allowed is paced: topology {config.topology.name!r} states a pace"
            " for its nodes, and real compute cannot be stretched"
        )
    if config.compute.pace not in ((), pace):
        raise RequestError(
            f"{file}: compute.pace: found {list(config.compute.pace)}, allowed is none or what the topology's nodes"
            f" state: {list(pace)}"
        )
    return config.model_copy(update={"compute": config.compute.model_copy(update={"pace": pace})})


def _locate(topology: str, near: Path | None) -> str:
    if near is not None and not Path(topology).is_file():
        for folder in (near, *near.resolve().parents):
            if (folder / topology).is_file():
                return str(folder / topology)
    return topology


def _absolute_paths(data: dict[str, Any]) -> dict[str, Any]:
    """Local text and initial weights by their full paths: trainers run in another folder."""
    changed = {}
    for name, key in (("data", "source"), ("model", "init_from")):
        section = data.get(name)
        if isinstance(section, dict) and isinstance(section.get(key), str) and Path(section[key]).exists():
            changed[name] = {**section, key: str(Path(section[key]).resolve())}
    return changed


def check_data(config: RunConfig) -> None:
    """Reads the text once before anything is started, so that a bad file is an error of the request.

    Raises:
        RequestError: the text cannot be read, or is too short for the configuration; no initial weights.
    """
    if config.model.init_from is not None and not Path(config.model.init_from).exists():
        raise RequestError(
            f"model.init_from: found {config.model.init_from!r}, allowed is the folder of a run that has ended,"
            " or a folder or file of safetensors"
        )
    try:
        evaluation_windows(load_corpus(config.data, config.seed), config)
    except DataError as error:
        raise RequestError(str(error)) from error


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads a YAML mapping, refusing duplicate keys; RequestError otherwise."""
    try:
        return load_yaml(path)
    except TopologyError as error:
        raise RequestError(str(error)) from error


def write_config(config: RunConfig, path: Path) -> None:
    """Writes the resolved configuration."""
    path.write_text(yaml.safe_dump(config.plain(), sort_keys=False, allow_unicode=True), encoding="utf-8")
