"""How a running delay line is told other figures: a socket pair, one datagram of JSON each way.

The network keeps one end, the delay line has the other as its standard input. Only what changes is sent; the answer
holds what the line has now, which the asker compares: a figure that was not taken over is an error, not a hope.
"""

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from testbed.errors import TestbedError

Figures = tuple[float, float, float]
"""Delay in ms, jitter in ms, share of packets lost."""
ANSWER_TIMEOUT_S = 5.0
MAX_BYTES = 65_536
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Answer:
    """What the delay line did."""

    settles_s: (
        float  # until the last packet that arrived before the change has left, where the delay was shortened
    )


class DelayControl:
    """The network's end."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(ANSWER_TIMEOUT_S)

    def started(self) -> None:
        """To be called once the delay line has its end: ours then notices when it dies."""
        self.theirs.close()

    def close(self) -> None:
        """Closes both ends."""
        self._ours.close()
        self.theirs.close()

    def set(self, figures: Mapping[int, Figures]) -> Answer:
        """Gives queues other figures and compares what the line then has.

        Raises:
            TestbedError: no answer, or other figures than asked for.
        """
        try:
            self._ours.send(json.dumps({str(queue): f for queue, f in figures.items()}).encode())
            answer = json.loads(self._ours.recv(MAX_BYTES) or b"{}")
        except (OSError, ValueError) as error:
            raise TestbedError(f"the delay line does not answer ({error or 'silence'})") from error
        got = answer.get("figures", {})
        for queue, wanted in figures.items():
            now = got.get(str(queue))
            if now is None or any(abs(a - b) > TOLERANCE for a, b in zip(now, wanted, strict=True)):
                raise TestbedError(f"the delay line was asked for {wanted} in queue {queue} and has {now}")
        return Answer(float(answer["settles_s"]))


class Obedience:
    """The delay line's end: takes requests over into ``paths`` (seconds, seconds, share), and answers."""

    def __init__(self, sock: socket.socket, paths: dict[int, Figures]) -> None:
        self.sock, self._paths = sock, paths
        sock.setblocking(False)

    def obey(self, last_due: Mapping[int, float]) -> bool:
        """Takes in one request; ``last_due``: queue -> when its last packet leaves. False once nobody asks any more."""
        try:
            message = self.sock.recv(MAX_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not message:
            return False
        asked: dict[str, list[float]] = json.loads(message)
        settles_s = 0.0
        for number, (delay_ms, jitter_ms, loss) in asked.items():
            queue = int(number)
            if queue not in self._paths:
                continue
            self._paths[queue] = (delay_ms / 1e3, jitter_ms / 1e3, loss)
            if queue in last_due:
                settles_s = max(settles_s, last_due[queue] - time.monotonic() - delay_ms / 1e3)
        now = {number: self._paths.get(int(number)) for number in asked}
        figures = {number: (f[0] * 1e3, f[1] * 1e3, f[2]) if f else None for number, f in now.items()}
        self.sock.send(json.dumps({"figures": figures, "settles_s": settles_s}).encode())
        return True
