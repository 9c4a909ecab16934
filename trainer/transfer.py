"""What one exchange moves: phases of byte ranges, cut into pieces so that work overlaps with the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

PIECE_BYTES = 256 * 1024
"""2 ms of a gigabit: small beside a round trip, large beside what a system call costs."""


@dataclass(frozen=True)
class Phase:
    """Bytes to and from peers, by member index; every tensor is uint8 [c], contiguous.

    What a phase receives is equally long from every peer if it has `arrived`, which is called with
    `(start, stop)` once that range has come from all of them. Ranges start at multiples of PIECE_BYTES
    and may come in any order. The next phase may send a range as soon as this call has returned.
    """

    sends: Mapping[int, Tensor]
    receives: Mapping[int, Tensor]
    arrived: Callable[[int, int], None] | None = field(default=None)

    def received_bytes(self) -> int:
        """Length of what each peer sends."""
        return max((row.numel() for row in self.receives.values()), default=0)


def pieces(total: int) -> Iterator[tuple[int, int]]:
    """The ranges that `total` bytes are cut into."""
    for start in range(0, total, PIECE_BYTES):
        yield start, min(start + PIECE_BYTES, total)


class Transport(Protocol):
    """Moves the bytes of an exchange; all members call `run` with matching phases, in the same order."""

    @property
    def index(self) -> int:
        """This process's place among the members."""

    @property
    def size(self) -> int:
        """How many members there are."""

    def run(self, phases: list[Phase]) -> None:
        """Return when everything was received and everything to send was handed over."""

    @property
    def handshake_bytes(self) -> int:
        """What opening the connections took, exactly; 0 where the transport does not say."""

    def framing_bytes(self, phases: list[Phase]) -> int:
        """What travels besides the payload, exactly; 0 where the transport does not say."""

    def stream(self, name: str) -> Transport:
        """Another transport between the same members, whose traffic is independent of this one's."""
