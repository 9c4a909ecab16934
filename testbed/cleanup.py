"""Finds and removes what dead runs left, and only that."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from testbed.session import STATE_DIR, SessionState, kill_marked, marked_processes, read_sessions


@dataclass(frozen=True)
class Leftover:
    """A session whose owner is dead, and the processes (with their namespaces) that outlived it."""

    session: SessionState
    processes: list[int]


def leftovers(state_dir: Path = STATE_DIR) -> list[Leftover]:
    """What ``clean`` would remove."""
    return [
        Leftover(session, marked_processes(session.session_id))
        for session in read_sessions(state_dir)
        if not session.alive
    ]


def clean(state_dir: Path = STATE_DIR) -> list[Leftover]:
    """Removes the leftovers; sessions with a living owner and everything that is not ours stay untouched."""
    found = leftovers(state_dir)
    for leftover in found:
        kill_marked(leftover.session.session_id)
        shutil.rmtree(leftover.session.folder, ignore_errors=True)
    return found
