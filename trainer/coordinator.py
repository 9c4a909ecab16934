"""`python -m trainer.coordinator CONFIG.yaml`: keeps the list of who takes part; outlives any rank.

It listens on MASTER_PORT + 1 and holds the rendezvous store on MASTER_PORT. Ranks keep one connection each and
speak JSON lines over it: a connection that closes, or is silent too long, is a lost replica. A few hundred
bytes a round pass here, no tensor does. It ends when the last rank has left, or when nobody is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from trainer.config import load_config
from trainer.config_errors import ConfigError
from trainer.council import Council, Replies

LONGEST_LINE = 1 << 20
BEAT_EVERY_S = 1.0


class Coordinator:
    """Sockets around a `Council`; single-threaded, so that every decision has one order."""

    def __init__(self, council: Council, listener: socket.socket, silence_s: float) -> None:
        self.council, self.silence_s = council, silence_s
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._rank_of: dict[socket.socket, int | None] = {}
        self._connection_of: dict[int, socket.socket] = {}
        self._heard: dict[socket.socket, float] = {}
        self._rest: dict[socket.socket, bytes] = {}
        self._left: set[int] = set()

    def serve(self, patience_s: float) -> None:
        """Until everybody has left.

        Raises:
            TimeoutError: not everybody came within `patience_s`.
        """
        deadline = time.monotonic() + patience_s
        while not self._over():
            for key, _ in self._selector.select(BEAT_EVERY_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._rank_of:
                    self._read(key.fileobj)
            now = time.monotonic()
            for connection in [c for c, heard in self._heard.items() if now - heard > self.silence_s]:
                self._lose(connection, f"was silent for {self.silence_s:g} s")
            if not self.council.began and now > deadline:
                raise TimeoutError(f"not every rank came within {patience_s:g} s")

    def _over(self) -> bool:
        living = self.council.living
        return self.council.began and (not living or living <= self._left)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(self.silence_s)
        self._selector.register(connection, selectors.EVENT_READ)
        self._rank_of[connection], self._rest[connection] = None, b""
        self._heard[connection] = time.monotonic()

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._lose(connection, "closed its connection")
            return
        self._heard[connection] = time.monotonic()
        *lines, rest = (self._rest[connection] + data).split(b"\n")
        self._rest[connection] = rest
        for line in lines:
            if connection in self._rank_of:
                self._handle(connection, line)
        if len(rest) > LONGEST_LINE:
            self._lose(connection, "sent an endless line")

    def _handle(self, connection: socket.socket, line: bytes) -> None:
        try:
            said = json.loads(line)
            what, council = said["what"], self.council
            if what == "hello":
                self._hello(connection, int(said["rank"]))
            elif what == "meet":
                rank = self._rank_of[connection]
                if rank is not None:
                    ok, admits = bool(said["ok"]), bool(said["admits"])
                    self._send(
                        council.meet(rank, int(said["number"]), ok=ok, text=said["text"], admits=admits)
                    )
            elif what == "bye":
                rank = self._rank_of[connection]
                self._left |= {rank} if rank is not None else set()
        except (ValueError, KeyError, TypeError) as error:
            self._lose(connection, f"sent what is no message ({error})")

    def _hello(self, connection: socket.socket, rank: int) -> None:
        if not 0 <= rank < self.council.replicas * self.council.stages:
            raise ValueError(f"rank {rank}")
        earlier = self._connection_of.get(rank)
        if earlier is not None:
            self._lose(earlier, "was started again")
        self._rank_of[connection] = rank
        self._connection_of[rank] = connection
        self._send(self.council.arrive(rank))

    def _send(self, replies: Replies) -> None:
        broken = []
        for rank, message in replies:
            connection = self._connection_of.get(rank)
            try:
                if connection is not None:
                    connection.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                broken.append(connection)
        for connection in broken:
            if connection is not None and connection in self._rank_of:
                self._lose(connection, "could not be written to")

    def _lose(self, connection: socket.socket, why: str) -> None:
        rank = self._forget(connection)
        if rank is None or rank in self._left:
            return
        stages = self.council.stages
        replica, was_member = rank // stages, rank in self.council.living
        replies = list(self.council.leave(rank))
        if was_member:
            print(f"replica {replica} is lost: its rank {rank} {why}; epoch {self.council.epoch}", flush=True)
            for other in range(replica * stages, (replica + 1) * stages):
                if other in self._connection_of:
                    self._forget(self._connection_of[other])
        self._send(iter(replies))

    def _forget(self, connection: socket.socket) -> int | None:
        rank = self._rank_of.pop(connection, None)
        self._heard.pop(connection, None)
        self._rest.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()
        if rank is not None and self._connection_of.get(rank) is connection:
            del self._connection_of[rank]
        return rank


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one run; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.coordinator",
        description="Keep the list of replicas of a run with parallel.on_replica_loss: continue.",
        epilog="Example: MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python -m trainer.coordinator run.yaml",
    )
    parser.add_argument("config", metavar="CONFIG.yaml", type=Path)
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides")
    arguments = parser.parse_args(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (KeyError, ValueError):
        print(
            "environment: MASTER_ADDR and MASTER_PORT: allowed an address of this machine and a number",
            file=sys.stderr,
        )
        return 2
    # a wrong request should not wait for torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415

    parallel, timeout_s = config.parallel, config.train.timeout_s
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    council = Council(parallel.replicas, parallel.stages)
    try:
        with socket.create_server((host, port + 1), backlog=256) as listener:
            Coordinator(council, listener, parallel.silence_s).serve(timeout_s)
    except (OSError, TimeoutError) as error:
        print(f"coordinator: {error}", file=sys.stderr)
        return 1
    finally:
        del store
    return 0 if council.members else 1


if __name__ == "__main__":
    sys.exit(main())
