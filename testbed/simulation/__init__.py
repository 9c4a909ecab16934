"""Runs a `Workload` in simulated time: fluid flows over shared links, replicas as SimPy processes."""

from testbed.simulation.conditions import Conditions, Outage, Outcome, Pause, Straggler
from testbed.simulation.links import Links, Path
from testbed.simulation.run import simulate

__all__ = ["Conditions", "Links", "Outage", "Outcome", "Path", "Pause", "Straggler", "simulate"]
