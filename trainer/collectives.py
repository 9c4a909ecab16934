"""Exchanges within one group, with an exact count of the payload bytes each rank hands over.

Every result is the same bits on every member, whatever the network, the transport and the pieces: values are summed
in fp32 in rank order by everybody who needs them (two members) or by the owner of a shard (more), whose result the
others copy. gloo sums int8 with silent wrap-around, so quantised payloads are gathered as bytes and averaged by
whoever needs them.

`collective="naive"` is gloo's own all-reduce, the baseline that others compare with.
"""

from __future__ import annotations

import threading
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.metrics import Ledger
from trainer.process_group import ProcessGroup
from trainer.transfer import Phase, Transport

Wire = Literal["fp32", "bf16", "fp16"]
Collective = Literal["tuned", "naive"]
WIRE_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Exchange:
    """One group of `size` members in which this process is member `index`.

    `sent_bytes` grows by what each call hands to the transport; it may be read from another thread.
    Time in the transport, including waiting for a late peer, is booked to `bucket` of the ledger passed
    to each call.

    Over `PeerLinks` one exchange may be in flight at a time, which is checked; `stream` gives further ones.
    Without links the process group moves the bytes: gloo between CPUs, NCCL between GPUs.
    """

    def __init__(self, group: dist.ProcessGroup | None, bucket: str, links: Transport | None = None) -> None:
        """`group` may be None where there are links and nothing is averaged naively."""
        self._group = group
        if links is None:
            if group is None:
                raise ValueError("an exchange needs a process group or links")
            links = ProcessGroup(group)
        self.links = links
        self.size, self.index = self.links.size, self.links.index
        self.bucket = bucket
        self._sent_bytes = 0
        self._framing_bytes = self.links.handshake_bytes
        self._lock = threading.Lock()
        self._streams: list[Exchange] = []

    def use(self, links: Transport) -> None:
        """Go on with other members: `size` and `index` are theirs from here on."""
        self.links, self.size, self.index = links, links.size, links.index

    def send_to(self, member: int, payload: Tensor, ledger: Ledger) -> None:
        """uint8 [c] to one member, who calls `receive_from`."""
        length = torch.tensor([payload.numel()]).view(torch.uint8)
        self._move([Phase({member: length}, {})], ledger)
        self._move([Phase({member: payload}, {})], ledger)

    def receive_from(self, member: int, ledger: Ledger) -> Tensor:
        """What that member sends, uint8 [c]."""
        length = torch.zeros(1, dtype=torch.int64)
        self._move([Phase({}, {member: length.view(torch.uint8)})], ledger)
        payload = torch.empty(int(length), dtype=torch.uint8)
        self._move([Phase({}, {member: payload})], ledger)
        return payload

    @property
    def group(self) -> dist.ProcessGroup:
        """For collectives of torch's own; raises ValueError where there is none."""
        if self._group is None:
            raise ValueError("this exchange has no process group")
        return self._group

    @property
    def sent_bytes(self) -> int:
        """Payload bytes handed to the transport so far, those of streams included."""
        with self._lock:
            own, streams = self._sent_bytes, list(self._streams)
        return own + sum(stream.sent_bytes for stream in streams)

    @property
    def framing_bytes(self) -> int:
        """What the transport sent besides, exactly; 0 where it does not say. Streams included."""
        with self._lock:
            own, streams = self._framing_bytes, list(self._streams)
        return own + sum(stream.framing_bytes for stream in streams)

    def stream(self, name: str) -> Exchange:
        """An exchange of the same members that may be in flight beside this one; collective.

        To be made by all members in the same order, before training. Its own `sent_bytes` count its own
        traffic; this exchange's include it.

        Raises:
            RuntimeError: the transport is a process group.
        """
        stream = self._another(self.links.stream(name))
        with self._lock:
            self._streams.append(stream)
        return stream

    def count(self, sent_bytes: int) -> None:
        """Count what a collective of torch's own hands over on this group."""
        self._count(sent_bytes)

    def _another(self, links: Transport) -> Exchange:
        return Exchange(self._group, self.bucket, links)

    def _count(self, sent_bytes: int, framing_bytes: int = 0) -> None:
        with self._lock:
            self._sent_bytes += sent_bytes
            self._framing_bytes += framing_bytes

    def _move(self, phases: list[Phase], ledger: Ledger) -> None:
        sent = sum(row.numel() for phase in phases for row in phase.sends.values())
        with ledger.span(self.bucket):
            self._count(sent, self.links.framing_bytes(phases))
            self.links.run(phases)

    def _others(self) -> list[int]:
        """Everybody else, this member's successor first, so that not all send to the same one."""
        return [(self.index + step) % self.size for step in range(1, self.size)]

    def planned_gather_bytes(self, payload_bytes: int) -> int:
        """What `gather` will send: the payload to each of the others."""
        return (self.size - 1) * payload_bytes

    def gather(self, payload: Tensor, ledger: Ledger) -> list[Tensor]:
        """Everybody's payload, in rank order; `payload` is uint8 [c], equally long everywhere."""
        _check_row(payload)
        if self.size == 1 or payload.numel() == 0:
            return [payload] * self.size
        own = payload.contiguous()
        everybody = [own if p == self.index else torch.empty_like(own) for p in range(self.size)]
        others = self._others()
        self._move([Phase(dict.fromkeys(others, own), {p: everybody[p] for p in others})], ledger)
        return everybody

    def gather_float64(self, values: Tensor, ledger: Ledger) -> list[Tensor]:
        """Everybody's fp64 [k] values, in rank order."""
        payload = values.to(torch.float64).contiguous().view(torch.uint8)
        return [row.view(torch.float64) for row in self.gather(payload, ledger)]

    def exchange_with(self, peer: int, payload: Tensor, ledger: Ledger) -> Tensor:
        """The payload of member `peer`, who calls this with our index; both uint8 [c], equally long.

        Pairs are independent: others need not take part. Sends `payload.numel()` bytes.
        """
        _check_row(payload)
        if not 0 <= peer < self.links.size or peer == self.links.index:
            raise ValueError(
                f"peer: found {peer}, allowed 0 to {self.links.size - 1} except {self.links.index}"
            )
        theirs = torch.empty_like(payload)
        if payload.numel():
            self._move([Phase({peer: payload.contiguous()}, {peer: theirs})], ledger)
        return theirs

    def planned_shuffle_bytes(self, sizes: list[int]) -> int:
        """What `shuffle` will send of rows of these sizes."""
        return sum(sizes) - sizes[self.index]

    def shuffle(self, rows: list[Tensor], ledger: Ledger) -> list[Tensor]:
        """Row i goes to member i; returns what each member had for this one, in rank order.

        Rows are uint8 [c_i]; c_i is the same on every member.
        """
        for row in rows:
            _check_row(row)
        own, others = rows[self.index].contiguous(), self._others()
        received = [own if p == self.index else torch.empty_like(own) for p in range(self.size)]
        if others:
            sends = {p: rows[p].contiguous() for p in others}
            self._move([Phase(sends, {p: received[p] for p in others})], ledger)
        return received

    def planned_mean_bytes(self, numel: int, wire: Wire, collective: Collective) -> int:
        """What `mean` will send for a flat tensor of `numel` values.

        tuned, two members: all values to the other. tuned, D members: every shard but the own one to its
        owner, then the own one to all; shards have ceil(numel / D) values, the last ones fewer.
        naive: gloo's ring sends 2 (D-1) segments of 1/D of the values.
        """
        if self.size == 1 or numel == 0:
            return 0
        width = WIRE_DTYPES[wire].itemsize
        if collective == "naive":
            return 2 * (self.size - 1) * numel * width // self.size
        if self.size == 2:
            return numel * width
        start, stop = _shard(self.index, self.size, numel)
        return (numel + (self.size - 2) * (stop - start)) * width

    def mean(self, flat: Tensor, wire: Wire, collective: Collective, ledger: Ledger) -> Tensor:
        """The mean over members of fp32 [n], bit-identical on all of them.

        tuned: summed in fp32 in rank order, piece by piece while the next pieces travel; exact but for
        `wire`, to which values are rounded before they travel (with more than two members also the
        means). naive: summed by gloo in `wire`.
        """
        if self.size == 1 or flat.numel() == 0:
            return flat.clone()
        if collective == "naive":
            return self._naive_mean(flat, wire, ledger)
        with ledger.span("compress_s"):
            values = flat.contiguous().to(WIRE_DTYPES[wire])
        return self._direct_mean(values, ledger) if self.size == 2 else self._sharded_mean(values, ledger)

    def _direct_mean(self, values: Tensor, ledger: Ledger) -> Tensor:
        """Each sends everything to the other: one phase, half the latency of shards and no more bytes."""
        theirs = torch.empty_like(values)
        result = theirs if values.dtype == torch.float32 else torch.empty(values.shape, device=values.device)
        both = [values, theirs] if self.index == 0 else [theirs, values]

        def arrived(start: int, stop: int) -> None:
            part = slice(start // values.itemsize, stop // values.itemsize)
            with ledger.span("compress_s"):
                _mean_into(result[part], [row[part] for row in both])

        other = 1 - self.index
        self._move([Phase({other: _bytes(values)}, {other: _bytes(theirs)}, arrived)], ledger)
        return result

    def _sharded_mean(self, values: Tensor, ledger: Ledger) -> Tensor:
        """Everybody averages one shard and hands it to all: 2 (D-1)/D of the bytes."""
        shards = [slice(*_shard(p, self.size, values.numel())) for p in range(self.size)]
        mine, others = shards[self.index], self._others()
        result = torch.empty_like(values)
        inbox = [
            values[mine] if p == self.index else torch.empty_like(values[mine]) for p in range(self.size)
        ]
        owned = result[mine]

        def arrived(start: int, stop: int) -> None:
            part = slice(start // values.itemsize, stop // values.itemsize)
            with ledger.span("compress_s"):
                _mean_into(owned[part], [row[part] for row in inbox])

        scatter = Phase(
            {p: _bytes(values[shards[p]]) for p in others}, {p: _bytes(inbox[p]) for p in others}, arrived
        )
        spread = Phase({p: _bytes(owned) for p in others}, {p: _bytes(result[shards[p]]) for p in others})
        self._move([scatter, spread], ledger)
        with ledger.span("compress_s"):
            return result.float()

    def _naive_mean(self, flat: Tensor, wire: Wire, ledger: Ledger) -> Tensor:
        with ledger.span("compress_s"):
            total = flat.to(WIRE_DTYPES[wire], copy=True)
        with ledger.span(self.bucket):
            self._count(self.planned_mean_bytes(flat.numel(), wire, "naive"))
            dist.all_reduce(total, group=self.group)
        return total.float() / self.size


def _shard(index: int, members: int, numel: int) -> tuple[int, int]:
    """Which of `numel` values member `index` owns."""
    size = -(-numel // members)
    return min(index * size, numel), min((index + 1) * size, numel)


def _mean_into(out: Tensor, rows: list[Tensor]) -> None:
    """The mean of `rows`, in their order, in fp32; `out` may be one of two rows."""
    total = rows[0].float() + rows[1].float()
    for row in rows[2:]:
        total += row.float()
    out.copy_(total.div_(len(rows)))


def _bytes(row: Tensor) -> Tensor:
    return row.view(torch.uint8)


def _check_row(payload: Tensor) -> None:
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise ValueError(f"payload must be one row of uint8, found {payload.dtype} {tuple(payload.shape)}")
