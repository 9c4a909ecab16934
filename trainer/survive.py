"""How local-update methods go on without a lost replica, and with one that came back.

An exchange counts only if it succeeded on every living rank of every stage: all vote, and who finished throws
the result away if another did not. Then connections are made anew among the living, and the same pseudo-gradients are
exchanged again; the mean is over those who are left, weighted by their tokens. So outer parameters stay
bit-identical whatever moment a replica dies at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.collectives import Exchange
from trainer.compression.averagers import Averaged, Averager, TakeSent, Tensors, ignore_sent
from trainer.links import PeerLinks
from trainer.membership import Membership, Outcome
from trainer.metrics import Ledger
from trainer.peers import PeerLost
from trainer.state import State, join_state, split_state
from trainer.tensor_file import decode_tensors, encode_tensors
from trainer.transfer import Phase, Transport

TRIES = 3
"""Exchanges that may fail one after the other although nobody was lost."""


class Alone:
    """The transport of the last replica: there is nobody to send to."""

    index, size = 0, 1
    handshake_bytes = 0

    def run(self, phases: list[Phase]) -> None:
        """Nothing to move."""

    def framing_bytes(self, phases: list[Phase]) -> int:
        """Nothing travels."""
        return 0

    def stream(self, name: str) -> Transport:
        """Itself: nothing can get in its way."""
        return self


class Survivors:
    """One rank's connections to the stage peers that are alive, made anew when they change."""

    def __init__(
        self, membership: Membership, store: Store, stages: int, weights: Sequence[float], timeout_s: float
    ) -> None:
        self.membership, self._weights = membership, weights
        self.replica, self.stage = divmod(membership.rank, stages)
        self.members = membership.welcome.members
        self._store, self._stages, self._timeout_s = store, stages, timeout_s
        self._wanted = (membership.welcome.epoch, 0)
        self._connected: tuple[int, int] | None = None
        self._links: PeerLinks | None = None
        self._peers = self.members

    @property
    def newcomer(self) -> bool:
        """Whether the others were there before."""
        return self.membership.welcome.donor is not None

    @property
    def renormalisation(self) -> float:
        """What makes the weights of those who are connected add up to their number."""
        return len(self._peers) / sum(self._weights[replica] for replica in self._peers)

    @property
    def lead(self) -> bool:
        """Whether this replica validates and writes the weights."""
        return self.replica == min(self.membership.latest.members)

    def heed(self, outcome: Outcome) -> None:
        """Take over who is alive; a failure without a loss asks for new connections too."""
        epoch, attempt = self._wanted
        if outcome.epoch != epoch:
            self._wanted = (outcome.epoch, 0)
        elif not outcome.ok:
            self._wanted = (epoch, attempt + 1)
        self.members = outcome.members

    def connect(self, exchange: Exchange) -> None:
        """Make `exchange` one among the living, if it is not; collective over them.

        Raises:
            PeerLost: somebody did not come.
        """
        if self.membership.latest.epoch != self._wanted[0]:
            self.heed(self.membership.latest)
        if self._connected == self._wanted:
            return
        if self._links is not None:
            self._links.close()
            self._links = None
        transport: Transport = Alone()
        if len(self.members) > 1:
            ranks = [replica * self._stages + self.stage for replica in self.members]
            store = PrefixStore("links/{}/{}/{}".format(*self._wanted, self.stage), self._store)
            index = self.members.index(self.replica)
            transport = self._links = PeerLinks(store, index, ranks, self._timeout_s)
        exchange.use(transport)
        self._peers = self.members
        self._connected = self._wanted

    def close(self) -> None:
        """Say goodbye, then close the connections."""
        self.membership.leave()
        if self._links is not None:
            self._links.close()

    def hand_over(self, outcome: Outcome, exchange: Exchange, state: State, ledger: Ledger) -> None:
        """After a meeting that let somebody in: the donor sends `state` to its new stage peers.

        A newcomer that is lost again on the way is no failure here: the next exchange will do without it.
        """
        self.heed(outcome)
        try:
            self.connect(exchange)
            if outcome.donor == self.replica:
                payload = _to_bytes(state)
                for replica in outcome.joined:
                    exchange.send_to(self.members.index(replica), payload, ledger)
        except PeerLost as error:
            print(f"nothing was handed over: {error}", flush=True)

    def take_over(self, exchange: Exchange, ledger: Ledger) -> State:
        """The state that the donor sends to this newcomer."""
        donor = self.membership.welcome.donor
        if donor is None:
            raise RuntimeError("nobody to take over from: all began together")
        self.connect(exchange)
        return _from_bytes(exchange.receive_from(self.members.index(donor), ledger))


class SurvivingAverager(Averager):
    """Any averager, among whoever is alive: tried again without those that were lost on the way.

    An exchange that is tried again sends more than `planned_bytes`.
    """

    def __init__(self, inner: Averager, survivors: Survivors) -> None:
        super().__init__(inner.shapes)
        self.inner, self.survivors = inner, survivors

    @property
    def rank(self) -> int | None:  # type: ignore[override]
        """The wrapped averager's."""
        return self.inner.rank

    def set_rank(self, rank: int) -> None:
        """Hand on to the wrapped averager."""
        self.inner.set_rank(rank)

    def forget(self) -> None:
        """Hand on to the wrapped averager."""
        self.inner.forget()

    def state_dict(self) -> State:
        """The wrapped averager's."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hand on to the wrapped averager."""
        self.inner.load_state_dict(state)

    def planned_bytes(self, exchange: Exchange) -> int:
        """The wrapped averager's, for one try among those that are alive now."""
        return self.inner.planned_bytes(exchange)

    def average(
        self, tensors: Tensors, exchange: Exchange, ledger: Ledger, take_sent: TakeSent = ignore_sent
    ) -> Averaged:
        """See the classes."""
        survivors = self.survivors
        for _ in range(TRIES + len(survivors.members)):
            before = _copy(self.inner.state_dict())
            averaged, failure = self._try(tensors, exchange, ledger, take_sent)
            factor = survivors.renormalisation  # of who took part, even if one of them has died since
            with ledger.span(exchange.bucket):
                outcome = survivors.membership.meet(ok=averaged is not None)
            survivors.heed(outcome)
            if outcome.ok and averaged is not None:
                mean = averaged.mean if factor == 1.0 else {n: factor * t for n, t in averaged.mean.items()}
                return replace(averaged, mean=mean)
            self.inner.load_state_dict(before)
        raise RuntimeError(f"{TRIES} exchanges in a row failed although nobody was lost: {failure}")

    def _try(
        self, tensors: Tensors, exchange: Exchange, ledger: Ledger, take_sent: TakeSent
    ) -> tuple[Averaged | None, Exception | None]:
        try:
            with ledger.span(exchange.bucket):
                self.survivors.connect(exchange)
            return self.inner.average(tensors, exchange, ledger, take_sent), None
        except RuntimeError as error:
            print(f"exchange failed: {error}", flush=True)
            return None, error


def _copy(state: State) -> State:
    tensors, tree = split_state(state)
    copied: State = join_state({name: tensor.clone() for name, tensor in tensors.items()}, tree)
    return copied


def _to_bytes(state: State) -> Tensor:
    """Eight bytes with the length of the JSON tree, the tree, the tensors."""
    tensors, tree = split_state(state)
    text = json.dumps(tree, allow_nan=False).encode()
    head = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return torch.cat([head, encode_tensors(tensors)])


def _from_bytes(payload: Tensor) -> State:
    length = int.from_bytes(payload[:8].numpy().tobytes(), "little")
    tree = json.loads(payload[8 : 8 + length].numpy().tobytes())
    state: State = join_state(decode_tensors(payload[8 + length :], "the state of a peer"), tree)
    return state
