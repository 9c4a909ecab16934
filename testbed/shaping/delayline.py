"""The delay line: one process that holds every packet of its NFQUEUEs for a fixed time.

Started in the core's namespace as ``python -m testbed.shaping.delayline CONFIG STATS``. Packets stay in the
kernel; only their metadata is copied here, and packets whose time has come are released by batch verdict. The
wait counts from the kernel's own time stamp of a packet, so that a late wake-up of this process does not add to
it. Delay never reorders: a packet is due no earlier than the one before it, with jitter and when a delay is shortened
while it runs (``testbed.shaping.control``, on standard input). Lost packets are dropped on arrival. STATS (JSON) is rewritten every half second with how
late packets were released, which is what decides whether a run may be believed.

Nothing from outside the standard library is loaded: no binding on PyPI offers both the GSO flag and batch verdicts. Message formats are those
of linux/netfilter/nfnetlink_queue.h.
"""

import json
import os
import random
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections import deque
from pathlib import Path

from testbed.lateness import Lateness
from testbed.shaping.control import Obedience

NETLINK_NETFILTER = 12
NFNL_SUBSYS_QUEUE = 3
MSG_PACKET, MSG_VERDICT, MSG_CONFIG, MSG_VERDICT_BATCH = (NFNL_SUBSYS_QUEUE << 8 | m for m in range(4))
CFG_CMD, CFG_PARAMS, CFG_QUEUE_MAXLEN, CFG_MASK, CFG_FLAGS = 1, 2, 3, 4, 5
CMD_BIND = 1
COPY_META = 1
FLAG_GSO = 4
ATTR_VERDICT_HDR, ATTR_TIMESTAMP = 2, 4
NF_DROP, NF_ACCEPT = 0, 1
NLM_F_REQUEST, NLM_F_ACK, NLMSG_ERROR = 1, 4, 2
SOL_NETLINK, NETLINK_NO_ENOBUFS = 270, 5
SO_RCVBUFFORCE = 33
RECEIVE_BUFFER_BYTES = 64 << 20
STATS_EVERY_S = 0.5
EARLY_S = 40e-6
"""Half of what a wake-up takes: packets due within it go at once, which rounds their wait instead of adding to it."""
SPIN_S = 250e-6
"""An idle processor takes this long to wake up, so a wait of over SPIN_ABOVE_S ends with so much of polling."""
SPIN_ABOVE_S = 1e-3
OLDEST_S = 0.1
"""A time stamp further back than this, or ahead of now, is not believed (the wall clock was set)."""
SO_TIMESTAMP_OLD = 29

_HEADER = struct.Struct("=IHHII")
_ATTR = struct.Struct("=HH")
_TIMESTAMP = struct.Struct("!QQ")
_TIMESTAMP_HEADER = _ATTR.pack(4 + _TIMESTAMP.size, ATTR_TIMESTAMP)
_FIRST_ATTRIBUTE = 20


def _attribute(kind: int, payload: bytes) -> bytes:
    return _ATTR.pack(4 + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


def _message(kind: int, queue: int, body: bytes, flags: int = NLM_F_REQUEST) -> bytes:
    body = struct.pack("!BBH", 0, 0, queue) + body
    return _HEADER.pack(16 + len(body), kind, flags, 0, 0) + body


def _configure(sock: socket.socket, queue: int, max_packets: int) -> None:
    """Binds one queue; raises OSError with the kernel's reason."""
    for body in (
        _attribute(CFG_CMD, struct.pack("!BxH", CMD_BIND, socket.AF_INET)),
        _attribute(CFG_PARAMS, struct.pack("!IB", 0, COPY_META)),
        _attribute(CFG_QUEUE_MAXLEN, struct.pack("!I", max_packets)),
        _attribute(CFG_FLAGS, struct.pack("!I", FLAG_GSO))
        + _attribute(CFG_MASK, struct.pack("!I", FLAG_GSO)),
    ):
        sock.send(_message(MSG_CONFIG, queue, body, NLM_F_REQUEST | NLM_F_ACK))
        reply = sock.recv(4096)
        _, kind, _, _, _ = _HEADER.unpack_from(reply)
        error = struct.unpack_from("=i", reply, 16)[0] if kind == NLMSG_ERROR else 0
        if error:
            raise OSError(-error, f"NFQUEUE {queue}: {os.strerror(-error)}")


class ArrivalClock:
    """When a packet entered this namespace, by the kernel's stamp in its message, on the monotonic clock."""

    def __init__(self) -> None:
        # The kernel stamps packets as long as any socket on the machine asks for it.
        self._asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._asking.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMP_OLD, 1)
        self._offset = _FIRST_ATTRIBUTE

    def arrival(self, message: memoryview) -> float:
        """Seconds; the present where the message carries no believable stamp."""
        now = time.monotonic()
        offset = self._offset
        if message[offset : offset + 4] != _TIMESTAMP_HEADER:
            offset = self._find(message)
            if not offset:
                return now
            self._offset = offset  # messages of one kind are laid out alike
        seconds, microseconds = _TIMESTAMP.unpack_from(message, offset + 4)
        age = time.time() - (seconds + microseconds / 1e6)
        return now - age if 0 <= age <= OLDEST_S else now

    @staticmethod
    def _find(message: memoryview) -> int:
        offset = _FIRST_ATTRIBUTE
        while offset + 4 <= len(message):
            if message[offset : offset + 4] == _TIMESTAMP_HEADER:
                return offset
            length, _ = _ATTR.unpack_from(message, offset)
            offset += max(4, (length + 3) & ~3)
        return 0


def kernel_drops() -> int:
    """Packets that this namespace's queues dropped (full queue or full socket), from procfs."""
    try:
        lines = Path("/proc/net/netfilter/nfnetlink_queue").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(fields[5]) + int(fields[6]) for fields in (line.split() for line in lines))


class DelayLine:
    """Binds the queues and runs until SIGTERM."""

    def __init__(
        self,
        paths: dict[int, tuple[float, float, float]],
        max_packets: int,
        stats: Path,
        control: socket.socket | None = None,
    ) -> None:
        """``paths``: queue number -> (delay ms, jitter ms, share of packets lost); ``control``: for other figures."""
        self.paths = {
            queue: (delay / 1e3, jitter / 1e3, loss) for queue, (delay, jitter, loss) in paths.items()
        }
        self.waiting: dict[int, deque[tuple[float, int]]] = {queue: deque() for queue in paths}
        self.random = random.Random(0)
        self.lost = 0
        self.lateness = Lateness()
        self.clock = ArrivalClock()
        self.stats = stats
        self.stopping = False
        self.control = Obedience(control, self.paths) if control else None
        self.sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self.sock.bind((0, 0))
        self.sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
        self.sock.setsockopt(SOL_NETLINK, NETLINK_NO_ENOBUFS, 1)
        for queue in paths:
            _configure(self.sock, queue, max_packets)
        self.sock.setblocking(False)

    def _receive(self) -> None:
        """Takes in everything that has arrived; all of it is due one delay from now."""
        buffer = bytearray(65536)
        view = memoryview(buffer)
        while True:
            try:
                size = self.sock.recv_into(buffer)
            except BlockingIOError:
                return
            offset = 0
            while offset + 16 <= size:
                length, kind, _, _, _ = _HEADER.unpack_from(view, offset)
                if kind == MSG_PACKET:
                    queue = int.from_bytes(view[offset + 18 : offset + 20], "big")
                    # NFQA_PACKET_HDR is always the first attribute; its value starts with the packet's id
                    packet = int.from_bytes(view[offset + 24 : offset + 28], "big")
                    self._hold(queue, packet, self.clock.arrival(view[offset : offset + length]))
                offset += (length + 3) & ~3

    def _hold(self, queue: int, packet: int, arrived: float) -> None:
        delay_s, jitter_s, loss = self.paths[queue]
        if loss and self.random.random() < loss:
            self.lost += 1
            self._verdict(MSG_VERDICT, queue, NF_DROP, packet)
            return
        due = arrived + delay_s
        waiting = self.waiting[queue]
        if jitter_s:
            due += self.random.uniform(-jitter_s, jitter_s)
        if waiting and due < waiting[-1][0]:
            due = waiting[-1][0]
        waiting.append((due, packet))

    def _verdict(self, kind: int, queue: int, verdict: int, packet: int) -> None:
        body = _attribute(ATTR_VERDICT_HDR, struct.pack("!II", verdict, packet))
        self.sock.send(_message(kind, queue, body))

    def _release(self) -> float:
        """Lets go of what is due; returns the seconds until the next packet is (at most the stats interval)."""
        now = time.monotonic()
        next_due = now + STATS_EVERY_S
        for queue, waiting in self.waiting.items():
            last = None
            while waiting and waiting[0][0] <= now + EARLY_S:
                due, last = waiting.popleft()
                self.lateness.add(max(0.0, now - due))
            if last is not None:
                self._verdict(MSG_VERDICT_BATCH, queue, NF_ACCEPT, last)
            if waiting:
                next_due = min(next_due, waiting[0][0])
        return max(0.0, next_due - EARLY_S - time.monotonic())

    def _controls(self) -> list[socket.socket]:
        return [self.control.sock] if self.control else []

    def _obey(self) -> None:
        last_due = {queue: waiting[-1][0] for queue, waiting in self.waiting.items() if waiting}
        if self.control and not self.control.obey(last_due):
            self.control = None

    def write_stats(self) -> None:
        """Replaces the statistics file in one step."""
        data = {
            **self.lateness.row(),
            "lost": self.lost,
            "drops": kernel_drops(),
            "written": time.monotonic(),
            "realtime": os.sched_getscheduler(0) == os.SCHED_FIFO,
        }
        temporary = self.stats.with_suffix(".tmp")
        temporary.write_text(json.dumps(data), encoding="utf-8")
        temporary.replace(self.stats)

    def run(self) -> None:
        """Holds and releases packets until told to stop."""
        stats_due = time.monotonic() + STATS_EVERY_S
        wait_s = STATS_EVERY_S
        slept_long = False
        while not self.stopping:
            released = self.lateness.packets
            if wait_s > SPIN_ABOVE_S:
                slept_long = True
                timeout_s = wait_s - SPIN_S
            else:
                timeout_s = 0.0 if slept_long else wait_s
            asked, _, _ = select.select([self.sock, *self._controls()], [], [], timeout_s)
            self._receive()
            if self.control and self.control.sock in asked:
                self._obey()
            wait_s = self._release()
            slept_long = slept_long and self.lateness.packets == released
            if time.monotonic() >= stats_due:
                self.write_stats()
                stats_due = time.monotonic() + STATS_EVERY_S
        self.write_stats()


def main() -> int:
    """Reads CONFIG, binds, writes the first STATS as the sign of being ready, and runs."""
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    paths = {int(queue): (float(d), float(j), float(p)) for queue, (d, j, p) in config["queues"].items()}
    is_socket = stat.S_ISSOCK(os.fstat(0).st_mode)
    control = socket.socket(fileno=os.dup(0)) if is_socket else None
    line = DelayLine(paths, int(config["max_packets"]), Path(sys.argv[2]), control)

    def stop(*_: object) -> None:
        line.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line.write_stats()
    line.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
