"""How far a rank is: plain numbers that a resumed process continues from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.state import State, check_keys


@dataclass
class Progress:
    """Counters of one rank, as of its last step record.

    `synchronisations` counts the steps after which `close_round` ran. `planned_bytes` is what
    the method said it would send across the WAN, `seconds` the ledger's reading,
    `payload_bytes` what was sent to `wan`, `lan` and for `evaluation`, `file_bytes` how long each of the
    rank's JSON-lines files was.
    """

    step: int = 0
    tokens: int = 0
    rounds: int = 0
    planned_bytes: int = 0
    synchronisations: int = 0
    evaluated_at: int = 0
    checkpointed_at: int = 0
    overran_steps: int = 0
    last_loss: float | None = None
    last_validation: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    payload_bytes: dict[str, int] = field(default_factory=lambda: {"wan": 0, "lan": 0, "evaluation": 0})
    file_bytes: dict[str, int] = field(default_factory=dict)

    def state_dict(self) -> State:
        """All of it is plain."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """The inverse of `state_dict`.

        Raises:
            StateError: other counters.
        """
        check_keys("progress", set(state), set(cls.__dataclass_fields__))
        return cls(**state)
