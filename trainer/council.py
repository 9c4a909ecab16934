"""Who takes part, decided in one place: pure rules, no sockets, no clock.

Ranks of the same replica live and die together. Meetings are numbered, and all
living ranks come to each; one ends when every living rank has spoken, and everybody hears the same outcome. A replica that died is
left out from then on; one that came back is let in at the end of a meeting that admits, and only whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from trainer.state import State

Replies = Iterator[tuple[int, State]]
"""(rank, message to it)."""


@dataclass
class Meeting:
    """What has been said so far, by rank."""

    admits: bool
    votes: dict[int, bool] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)


class Council:
    """Membership of a world of `replicas` x `stages` ranks; every change of it is a new epoch."""

    def __init__(self, replicas: int, stages: int) -> None:
        self.replicas, self.stages = replicas, stages
        self.members: set[int] = set()
        self.epoch = 0
        self.lost: list[int] = []
        self._waiting: set[int] = set()  # ranks that want in
        self._meetings: dict[int, Meeting] = {}

    @property
    def began(self) -> bool:
        """Whether everybody was there once."""
        return bool(self.members) or self.epoch > 0

    def _ranks(self, replica: int) -> set[int]:
        return set(range(replica * self.stages, (replica + 1) * self.stages))

    @property
    def living(self) -> set[int]:
        """Ranks of the members."""
        return {rank for replica in self.members for rank in self._ranks(replica)}

    def arrive(self, rank: int) -> Replies:
        """A rank has come. The first time all are awaited; later it waits for a meeting that admits."""
        self._waiting.add(rank)
        if not self.began and len(self._waiting) == self.replicas * self.stages:
            self.members = set(range(self.replicas))
            everybody, self._waiting = sorted(self._waiting), set()
            for one in everybody:
                yield one, self._outcome(0, ok=True, joined=[], donor=None, texts={})

    def leave(self, rank: int) -> Replies:
        """A rank is gone, and with it its replica; the meetings that waited for it may end."""
        self._waiting.discard(rank)
        replica = rank // self.stages
        if replica not in self.members:
            return
        self.members.remove(replica)
        self.lost.append(replica)
        self.epoch += 1
        for meeting in self._meetings.values():
            for gone in self._ranks(replica):
                meeting.votes.pop(gone, None)
                meeting.texts.pop(gone, None)
        for number in sorted(self._meetings):
            yield from self._end_if_complete(number)

    def meet(self, rank: int, number: int, *, ok: bool, text: str, admits: bool) -> Replies:
        """A rank has spoken in meeting `number`."""
        if rank not in self.living:
            yield rank, {"lost": True}
            return
        meeting = self._meetings.setdefault(number, Meeting(admits))
        meeting.votes[rank], meeting.texts[rank] = ok, text
        yield from self._end_if_complete(number)

    def _end_if_complete(self, number: int) -> Replies:
        meeting = self._meetings[number]
        living = sorted(self.living)
        if not living or set(meeting.votes) != set(living):
            return
        del self._meetings[number]
        ok = all(meeting.votes.values())
        donor, joined = min(self.members), self._let_in() if meeting.admits and ok else []
        texts = {str(rank): text for rank, text in meeting.texts.items()}
        outcome = self._outcome(number, ok=ok, joined=joined, donor=donor, texts=texts)
        for rank in sorted(self.living):
            yield rank, outcome

    def _let_in(self) -> list[int]:
        whole = [
            replica
            for replica in range(self.replicas)
            if replica not in self.members and self._ranks(replica) <= self._waiting
        ]
        for replica in whole:
            self.members.add(replica)
            self._waiting -= self._ranks(replica)
        self.epoch += bool(whole)
        return whole

    def _outcome(
        self, number: int, *, ok: bool, joined: list[int], donor: int | None, texts: dict[str, str]
    ) -> State:
        return {
            "met": number,
            "ok": ok,
            "epoch": self.epoch,
            "members": sorted(self.members),
            "joined": joined,
            "donor": donor,
            "texts": texts,
        }
