"""Ranks for tests: real processes with real gloo over loopback, kept alive between tests."""

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

JOB_TIMEOUT_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "lo",
    }


class Fleet:
    """Worker processes; `run` makes the first `size` of them the ranks of a fresh world."""

    def __init__(self) -> None:
        self.workers: list[subprocess.Popen[str]] = []

    def _grow(self, size: int) -> None:
        while len(self.workers) < size:
            self.workers.append(
                subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("worker.py"))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )

    def run(self, size: int, function: str, **arguments: Any) -> list[Any]:
        """What `jobs.<function>(**arguments)` returned on each rank."""
        self._grow(size)
        port = free_port()
        for rank, worker in enumerate(self.workers[:size]):
            job = {
                "environment": rank_environment(rank, size, port),
                "function": function,
                "arguments": arguments,
            }
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
        replies = self._collect(size)
        failed = [f"rank {rank}: {reply['error']}" for rank, reply in enumerate(replies) if "error" in reply]
        assert not failed, "\n".join(failed)
        return [reply["value"] for reply in replies]

    def _collect(self, size: int) -> list[dict[str, Any]]:
        replies: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + JOB_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            for rank, worker in enumerate(self.workers[:size]):
                selector.register(worker.stdout, selectors.EVENT_READ, rank)
            while len(replies) < size:
                ready = selector.select(max(deadline - time.monotonic(), 0))
                for key, _ in ready:
                    line = key.fileobj.readline()
                    replies[key.data] = json.loads(line) if line else {"error": "the worker died"}
                    selector.unregister(key.fileobj)
                if not ready:
                    self.close()
                    missing = sorted(set(range(size)) - set(replies))
                    raise TimeoutError(f"ranks {missing} did not answer within {JOB_TIMEOUT_S} s: {replies}")
        return [replies[rank] for rank in range(size)]

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
            worker.stdin.close()
            worker.stdout.close()
        self.workers = []
