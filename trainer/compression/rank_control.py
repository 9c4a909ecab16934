"""Chooses the rank, and with it H, from the energy that past exchanges captured."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.compressor_config import LowRankOptions
from trainer.state import State


class RankControl:
    """Reconstruction of DiLoCoX's adaptive compression (arXiv:2506.21263).

    The effective rank of an exchange is the fewest columns whose energy reaches `energy` of the input's
    (pseudo-gradient plus residual). If all columns together fall short, the rank should rise: each
    further column is taken to capture as much as the present ones do on average, and at most twice
    the rank is asked for. The truncated average alone could not tell, as it never has more than r
    columns. The rank is the mean effective rank over the last `window` exchanges (those before the
    first count as rank_1), kept within bounds, and H = max(min_local_steps, round(H_1 rank / rank_1)).

    All ranks must observe the same values; they then hold the same rank and H.
    """

    def __init__(self, config: LowRankOptions, local_steps: int) -> None:
        self._config = config
        self._first_local_steps = local_steps
        self._recent = deque([config.rank] * config.window, maxlen=config.window)
        self.rank = config.rank
        self.local_steps = local_steps

    def observe(self, columns: Tensor, total: float) -> int:
        """Take in one finished exchange, summed over all stages; returns its effective rank.

        Args:
            columns: fp64 [rank in use] energy by column, strongest first.
            total: energy of the whole input.
        """
        effective = effective_rank(columns, total, self._config.energy)
        self._recent.append(effective)
        low, high = self._config.rank_bounds
        self.rank = min(max(round(sum(self._recent) / len(self._recent)), low), high)
        shortened = round(self._first_local_steps * self.rank / self._config.rank)
        self.local_steps = max(self._config.min_local_steps, shortened)
        return effective

    def state_dict(self) -> State:
        """The window of effective ranks, and what it led to."""
        return {"recent": list(self._recent), "rank": self.rank, "local_steps": self.local_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse; the window's length is the configuration's."""
        self._recent.clear()
        self._recent.extend(int(rank) for rank in state["recent"])
        self.rank, self.local_steps = int(state["rank"]), int(state["local_steps"])


def effective_rank(columns: Tensor, total: float, energy: float) -> int:
    """Fewest columns that reach `energy` x `total`; more than there are if all fall short.

    >>> effective_rank(torch.tensor([8.0, 1.0, 1.0]), 10.0, 0.8)
    1
    >>> effective_rank(torch.tensor([2.0, 2.0]), 10.0, 0.6)
    3
    """
    present = len(columns)
    if total <= 0 or present == 0:
        return present
    reached = columns.cumsum(0)
    wanted = energy * total
    enough = torch.nonzero(reached >= wanted)
    if len(enough):
        return int(enough[0]) + 1
    captured = float(reached[-1])
    if captured <= 0:
        return 2 * present
    return min(2 * present, -int(-present * wanted // captured))
