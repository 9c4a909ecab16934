"""Did the computation keep the pace that it was given? Judged from what the ranks wrote."""

from typing import Any

import pandas as pd

from testbed.thresholds import OVERRUN_SHARE, OVERRUN_TIME_SHARE


def broken_pace(ranks: list[dict[str, Any]], steps: pd.DataFrame, *, stopped: bool = False) -> list[str]:
    """What is wrong, as sentences: too many steps that overran, or too much time lost in however few. Pure.

    ``stopped``: the topology's own events stop nodes, so a long pause proves nothing. A paced step never computes for less than its pace, so the shortest one shows the pace of its rank.
    """
    if not ranks or not any(int(rank["overran_steps"]) for rank in ranks):
        return []
    cure = "raise compute.step_s or quieten the machine"
    worst = max(ranks, key=lambda rank: int(rank["overran_steps"]))
    if worst["overran_steps"] > OVERRUN_SHARE * worst["steps"]:
        return [
            f"rank {worst['rank']}: {worst['overran_steps']} of {worst['steps']} steps took longer than their pace,"
            f" allowed {100 * OVERRUN_SHARE:g} %: {cure}"
        ]
    if stopped:
        return []
    computing = steps.groupby("rank")["compute_s"]
    lost = computing.mean() / computing.min() - 1
    if lost.empty or lost.max() <= OVERRUN_TIME_SHARE:
        return []
    return [
        f"rank {lost.idxmax()}: its steps computed {100 * lost.max():.1f} % longer than their pace,"
        f" allowed {100 * OVERRUN_TIME_SHARE:g} %: {cure}"
    ]
