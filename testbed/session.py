"""What we made, written down before it is made, so that it can be removed after any exit, SIGKILL included.

A session is a folder under /run/dilocox and an environment variable: every process that a session starts carries
``DILOCOX_SESSION=<id>``, so its processes are found in /proc whatever became of the one that started them. The
network lives in namespaces that those processes alone keep alive, so killing them removes it; nothing is ever
made in the host's own namespace. ``dilocox clean`` ends the sessions whose owner is dead, and only those.
"""

import json
import os
import secrets
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from testbed.errors import TestbedError
from testbed.remains import remove_remains

STATE_DIR = Path("/run/dilocox")
MARKER = "DILOCOX_SESSION"
KILL_TIMEOUT_S = 4.0


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (tells it from a later one of the same id); None if gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def marked_processes(session_id: str) -> list[int]:
    """Ids of all living processes whose environment carries the session's mark, ourselves excepted."""
    mark = f"{MARKER}={session_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if mark in environment.split(b"\0") and start_time(int(entry.name)) is not None:
            found.append(int(entry.name))
    return found


def kill_marked(session_id: str) -> int:
    """Kills all processes of a session and waits until they are gone; returns how many there were."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    killed: set[int] = set()
    while alive := marked_processes(session_id):
        for pid in alive:
            killed.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise TestbedError(f"processes {alive} of session {session_id} survive SIGKILL")
        time.sleep(0.01)
    return len(killed)


@dataclass(frozen=True)
class SessionState:
    """A session as its folder tells it."""

    session_id: str
    owner: int
    owner_started: int
    what: str
    folder: Path

    @property
    def alive(self) -> bool:
        """Whether the process that opened it still lives."""
        return start_time(self.owner) == self.owner_started


def read_sessions(state_dir: Path = STATE_DIR) -> list[SessionState]:
    """All sessions that are written down; a folder too damaged to read counts as owned by nobody."""
    sessions = []
    for folder in sorted(state_dir.iterdir()) if state_dir.is_dir() else []:
        try:
            data: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            state = SessionState(
                folder.name, int(data["owner"]), int(data["owner_started"]), str(data["what"]), folder
            )
        except FileNotFoundError:
            if time.time() - folder.stat().st_mtime < 5:
                continue  # being made this moment: the folder comes first, its state within microseconds
            state = SessionState(folder.name, 0, -1, "?", folder)
        except (OSError, ValueError, KeyError):
            state = SessionState(folder.name, 0, -1, "?", folder)
        sessions.append(state)
    return sessions


class Session:
    """A context in which things are made; leaving it removes them all."""

    def __init__(self, what: str) -> None:
        self.id = secrets.token_hex(4)
        self.what = what
        self.folder = STATE_DIR / self.id

    def __enter__(self) -> Self:
        try:
            STATE_DIR.mkdir(mode=0o755, exist_ok=True)
            self.folder.mkdir(mode=0o755)
        except PermissionError as error:
            raise TestbedError("building a network needs root: run as root or with sudo") from error
        state = {"owner": os.getpid(), "owner_started": start_time(os.getpid()), "what": self.what}
        temporary = self.folder / "state.tmp"
        temporary.write_text(json.dumps(state), encoding="utf-8")
        temporary.replace(self.folder / "state.json")
        return self

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every process of this session."""
        return {**os.environ, MARKER: self.id}

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        kill_marked(self.id)
        remove_remains(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
