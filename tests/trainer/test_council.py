"""Who takes part: the rules, without sockets and clocks."""

from trainer.council import Council


class Table:
    """A council, and what every rank has heard."""

    def __init__(self, replicas=3, stages=2):
        self.council = Council(replicas, stages)
        self.heard = {}
        for rank in range(replicas * stages):
            self.note(self.council.arrive(rank))

    def note(self, replies):
        for rank, message in replies:
            self.heard.setdefault(rank, []).append(message)

    def meet(self, number, ranks, no=(), admits=False):
        for rank in ranks:
            replies = self.council.meet(rank, number, ok=rank not in no, text=f"t{rank}", admits=admits)
            self.note(replies)

    def last(self, rank):
        return self.heard[rank][-1]


def test_everybody_is_awaited_at_the_start_and_hears_the_same():
    table = Table()
    assert all(table.heard[rank] == table.heard[0] for rank in range(6))
    assert (
        table.last(5)["members"] == [0, 1, 2]
        and table.last(5)["epoch"] == 0
        and table.last(5)["donor"] is None
    )


def test_a_meeting_ends_when_all_have_spoken_and_one_no_is_everybodys():
    table = Table()
    table.meet(1, [0, 1, 2, 3, 4])
    assert len(table.heard[0]) == 1, "one is missing"
    table.meet(1, [5], no=[5])
    assert [table.last(rank)["ok"] for rank in range(6)] == [False] * 6
    assert table.last(0)["texts"] == {str(rank): f"t{rank}" for rank in range(6)}


def test_the_loss_of_one_rank_takes_its_replica_out_and_ends_what_waited_for_it():
    table = Table()
    table.meet(1, [0, 1, 2, 3, 4])
    table.note(table.council.leave(5))
    for rank in range(4):
        assert table.last(rank) == table.last(0)
    assert table.last(0)["ok"] and table.last(0)["members"] == [0, 1] and table.last(0)["epoch"] == 1
    assert len(table.heard[4]) == 1, "its neighbour has no say any more"
    table.meet(2, [4])
    assert table.last(4) == {"lost": True}


def test_who_finished_before_dying_still_lets_the_others_finish():
    table = Table(replicas=2, stages=1)
    table.meet(1, [1])
    table.note(table.council.leave(1))
    table.meet(1, [0])
    assert table.last(0)["ok"] and table.last(0)["members"] == [0]


def test_a_replica_comes_back_whole_and_only_where_a_meeting_admits():
    table = Table()
    table.note(table.council.leave(2))
    table.note(table.council.arrive(2))
    table.meet(1, [0, 1, 4, 5], admits=True)
    assert table.last(0)["joined"] == [], "half of it is not there"
    table.note(table.council.arrive(3))
    table.meet(2, [0, 1, 4, 5])
    assert table.last(0)["joined"] == [], "this meeting does not admit"
    table.meet(3, [0, 1, 4], admits=True)
    table.meet(3, [5], admits=True)
    expected = {"met": 3, "ok": True, "epoch": 2, "members": [0, 1, 2], "joined": [1], "donor": 0}
    for rank in range(6):
        assert {key: table.last(rank)[key] for key in expected} == expected


def test_nobody_is_let_in_by_a_meeting_that_failed():
    table = Table(replicas=2, stages=1)
    table.note(table.council.leave(1))
    table.note(table.council.arrive(1))
    table.meet(1, [0], no=[0], admits=True)
    assert table.last(0)["members"] == [0] and not table.last(0)["ok"]


def test_the_last_one_goes_on_alone_and_then_it_is_over():
    table = Table(replicas=2, stages=1)
    table.note(table.council.leave(0))
    table.meet(1, [1])
    assert table.last(1)["ok"] and table.last(1)["members"] == [1] and table.council.lost == [0]
    table.note(table.council.leave(1))
    assert not table.council.living and table.council.began
