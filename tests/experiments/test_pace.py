import pandas as pd
import pytest

from experiments.pace import broken_pace

PACE_S = 0.28


def judged(compute_s: list[float], overran: int, **how) -> list[str]:
    steps = pd.DataFrame({"rank": [0] * len(compute_s) + [1] * 3, "compute_s": [*compute_s, *[PACE_S] * 3]})
    ranks = [{"rank": 0, "steps": len(compute_s), "overran_steps": overran}]
    return broken_pace([*ranks, {"rank": 1, "steps": 3, "overran_steps": 0}], steps, **how)


@pytest.mark.parametrize(
    ("compute_s", "overran", "said"),
    [
        ([PACE_S] * 160, 0, None),
        ([PACE_S] * 158 + [0.3, 0.3], 2, None),
        ([PACE_S] * 159 + [4.0], 1, "rank 0: its steps computed 8.3 % longer than their pace, allowed 2 %"),
        ([PACE_S] * 150 + [0.3] * 10, 10, "rank 0: 10 of 160 steps took longer than their pace, allowed 5 %"),
    ],
    ids=["quiet", "two hiccups", "one long pause", "many short ones"],
)
def test_pace_is_broken_by_many_steps_or_by_much_time(compute_s, overran, said):
    problems = judged(compute_s, overran)
    assert problems == [] if said is None else problems[0].startswith(said)


def test_a_pause_that_the_topology_asked_for_is_none_of_the_machines():
    assert judged([PACE_S] * 159 + [4.0], 1, stopped=True) == []


def test_without_ranks_or_steps_there_is_nothing_to_judge():
    empty = pd.DataFrame({"rank": [], "compute_s": []})
    assert broken_pace([], empty) == broken_pace([{"rank": 0, "steps": 9, "overran_steps": 0}], empty) == []
