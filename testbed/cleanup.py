"""Finds and removes what dead runs left, and only that; ends living sessions when told to."""

import contextlib
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from testbed.errors import TestbedError
from testbed.remains import remains, remove_remains
from testbed.session import STATE_DIR, SessionState, kill_marked, marked_processes, read_sessions


@dataclass(frozen=True)
class Leftover:
    """A session whose owner is dead, and the processes (with their namespaces) that outlived it."""

    session: SessionState
    processes: list[int]
    remains: list[str]


def leftovers(state_dir: Path = STATE_DIR) -> list[Leftover]:
    """What ``clean`` would remove."""
    return [
        Leftover(session, marked_processes(session.session_id), remains(session.folder))
        for session in read_sessions(state_dir)
        if not session.alive
    ]


def clean(state_dir: Path = STATE_DIR) -> list[Leftover]:
    """Removes the leftovers; sessions with a living owner and everything that is not ours stay untouched."""
    found = leftovers(state_dir)
    for leftover in found:
        kill_marked(leftover.session.session_id)
        remove_remains(leftover.session.folder)
        shutil.rmtree(leftover.session.folder, ignore_errors=True)
    return found


DOWN_TIMEOUT_S = 10.0


def down(session: SessionState, state_dir: Path = STATE_DIR) -> None:
    """Asks a session's owner to take it down, waits for that, and cleans up if the owner is dead already.

    Raises:
        TestbedError: the owner is still there after ten seconds.
    """
    deadline = time.monotonic() + DOWN_TIMEOUT_S
    if session.alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(session.owner, signal.SIGTERM)
    while session.alive and session.folder.exists():
        if time.monotonic() > deadline:
            raise TestbedError(
                f"session {session.session_id}: its owner, process {session.owner}, does not end"
            )
        time.sleep(0.05)
    for leftover in leftovers(state_dir):
        if leftover.session.session_id == session.session_id:
            kill_marked(session.session_id)
            remove_remains(session.folder)
            shutil.rmtree(session.folder, ignore_errors=True)
