"""A rank's seat at the coordinator: barriers and agreements among whoever is alive."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from trainer.coordinator import BEAT_EVERY_S


class MembershipError(RuntimeError):
    """The coordinator cannot be reached, or has given this replica up; one sentence."""


@dataclass(frozen=True)
class Outcome:
    """How a meeting ended: the same for everybody. `donor` is a member from before the meeting."""

    ok: bool
    epoch: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    donor: int | None
    texts: dict[int, str]


class Membership:
    """One connection to the coordinator; its methods are for one thread at a time, which is checked by a lock.

    A thread sends a sign of life every second, whatever training does.
    """

    def __init__(self, host: str, port: int, rank: int, timeout_s: float) -> None:
        """Connect, and wait until this rank's replica takes part: at the start, or when others let it in.

        Raises:
            MembershipError: the coordinator is not there, or nobody lets us in within `timeout_s`.
        """
        self.rank, self.timeout_s = rank, timeout_s
        self._met = 0
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._stopped = threading.Event()
        self._socket = self._connect(host, port, time.monotonic() + timeout_s)
        self._lines = self._socket.makefile("rb")
        self._send({"what": "hello", "rank": rank})
        threading.Thread(target=self._beat, name="sign-of-life", daemon=True).start()
        self.welcome = self._hear()

    def _connect(self, host: str, port: int, deadline: float) -> socket.socket:
        while True:
            try:
                connection = socket.create_connection((host, port), timeout=self.timeout_s)
            except OSError as error:  # it may not listen yet
                if time.monotonic() > deadline:
                    raise MembershipError(
                        f"rank {self.rank}: no coordinator at {host}:{port}: {error.strerror or error}"
                    ) from error
                time.sleep(0.05)
            else:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection

    def meet(self, *, ok: bool = True, text: str = "", admits: bool = False) -> Outcome:
        """Speak, and wait for everybody alive; all must come to the same meetings in the same order.

        Raises:
            MembershipError: the coordinator is gone, gave us up, or the others did not come in time.
        """
        with self._lock:
            number = self._met + 1
            self._send({"what": "meet", "number": number, "ok": ok, "text": text, "admits": admits})
            return self._hear()

    def barrier(self) -> None:
        """Return once everybody alive has come."""
        self.meet()

    def gather(self, text: str) -> list[str]:
        """The `text` of everybody alive, in rank order."""
        return [said for _, said in sorted(self.meet(text=text).texts.items())]

    def leave(self) -> None:
        """Say goodbye: from here on our silence is no loss."""
        self._stopped.set()
        self._send({"what": "bye"})
        self._socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError as error:
                raise MembershipError(
                    f"rank {self.rank}: the coordinator is gone: {error.strerror or error}"
                ) from error

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_EVERY_S):
            try:
                self._send({"what": "beat"})
            except MembershipError:
                return  # whoever speaks next will hear it

    def _hear(self) -> Outcome:
        try:
            line = self._lines.readline()
        except OSError as error:
            raise MembershipError(
                f"rank {self.rank}: no answer from the coordinator within {self.timeout_s:g} s"
            ) from error
        said: dict[str, Any] = json.loads(line) if line else {"lost": True}
        if said.get("lost"):
            raise MembershipError(f"rank {self.rank}: the coordinator has given this replica up")
        self._met = int(said["met"])
        self.latest = Outcome(
            bool(said["ok"]),
            int(said["epoch"]),
            tuple(said["members"]),
            tuple(said["joined"]),
            said["donor"],
            {int(rank): text for rank, text in said["texts"].items()},
        )
        return self.latest
