"""A network that another process holds up, seen from outside: where its links are and how to read them.

The process that builds a network leaves a description in the session's folder; ``dilocox top`` finds it there.
"""

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from testbed.plan import Link, NetworkPlan
from testbed.session import STATE_DIR, marked_processes, read_sessions

DESCRIPTION = "network.json"


def describe(plan: NetworkPlan, pids: dict[str, int], delay: str, folder: Path) -> None:
    """Writes what others need to read the links: ``pids`` names a process in each namespace."""
    data = {
        "topology": plan.topology.name,
        "delay": delay,
        "pids": pids,
        "links": [asdict(link) for link in plan.links],
    }
    temporary = folder / f"{DESCRIPTION}.tmp"
    temporary.write_text(json.dumps(data), encoding="utf-8")
    temporary.replace(folder / DESCRIPTION)


@dataclass(frozen=True)
class Place:
    """A namespace of somebody else's network."""

    pid: int

    def start_root(self, command: list[str], **params: Any) -> "subprocess.Popen[str]":
        """Starts a helper as root in it; it dies with us, and is not the session's."""
        entered = ["setpriv", "--pdeathsig", "KILL", "mnexec", "-a", str(self.pid), *command]
        return subprocess.Popen(entered, **params)


@dataclass(frozen=True)
class Attached:
    """A network that is up, held by another process."""

    session_id: str
    topology: str
    delay: str
    links: tuple[Link, ...]
    places: dict[str, Place]


def attach(state_dir: Path = STATE_DIR) -> list[Attached]:
    """Every network on this machine that is wholly up and whose owner lives."""
    found = []
    for session in read_sessions(state_dir):
        try:
            data = json.loads((session.folder / DESCRIPTION).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # being built, or not a network
        if not session.alive:
            continue
        ours = set(marked_processes(session.session_id))
        places = {name: Place(pid) for name, pid in data["pids"].items() if pid in ours}
        links = tuple(Link(**link) for link in data["links"] if link["owner"] in places)
        found.append(Attached(session.session_id, data["topology"], data["delay"], links, places))
    return found
