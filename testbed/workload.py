"""What a training run does to time and network, as plain data that a replay and a simulation both execute.

Every replica runs the same program: blocks of operations that repeat. An operation computes (`steps`),
does work that no pace covers (`busy`), starts an exchange in the background (`launch`) or waits for the
oldest one of that name that is still running (`wait`). An exchange is a chain of dependent phases in which
messages of stated sizes travel. Nothing here knows a method: whoever derives a workload does.
"""

import json
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from testbed.errors import TopologyError
from testbed.validation import Strict, load_yaml, sentence

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]


class Steps(Strict):
    """`count` training steps of `seconds` each at pace 1, bubbles of the pipeline included."""

    do: Literal["steps"] = "steps"
    count: Count = 1
    seconds: Seconds
    tokens: Annotated[int, Field(ge=0, strict=True)] = 0


class Busy(Strict):
    """Work that holds the replica up but moves nothing: compression, the outer step."""

    do: Literal["busy"] = "busy"
    seconds: Seconds
    what: str = "compress"


class Launch(Strict):
    """Starts an exchange; the program goes on at once."""

    do: Literal["launch"] = "launch"
    exchange: str


class Wait(Strict):
    """Waits until the oldest running exchange of that name is over."""

    do: Literal["wait"] = "wait"
    exchange: str


Operation = Annotated[Steps | Busy | Launch | Wait, Field(discriminator="do")]


class Block(Strict):
    """`body`, `repeat` times."""

    repeat: Count = 1
    body: list[Operation] = Field(min_length=1)


class Phase(Strict):
    """One dependent part of an exchange.

    `everyone`: a message of `message_bytes` from each member to each other, as in an all-gather or an
    all-to-all. `ring`: `times` rounds of a message to the next member, as in a ring all-reduce. `pair`: one
    message each way between partners, drawn anew for each exchange. A member begins a phase after
    `work_s` and once it has received all of the phase before.

    `window_bytes`: a member's transport has at most this much under way to one peer, whatever TCP allows
    (gloo's own chunks); None where only TCP limits.
    """

    pattern: Literal["everyone", "ring", "pair"] = "everyone"
    message_bytes: Bytes
    times: Count = 1
    work_s: Seconds = 0.0
    window_bytes: Annotated[int, Field(ge=1, strict=True)] | None = None

    def sent_bytes(self, members: int) -> int:
        """Payload that each member hands to its transport."""
        if members == 1:
            return 0
        each = members - 1 if self.pattern == "everyone" else 1
        return each * self.times * self.message_bytes


class Exchange(Strict):
    """Phases after one another; `streams` flows side by side carry each message (one per pipeline stage)."""

    phases: list[Phase] = Field(min_length=1)
    streams: Count = 1

    def sent_bytes(self, members: int) -> int:
        """Payload of one such exchange that each member hands to its transport."""
        return sum(phase.sent_bytes(members) for phase in self.phases)


class Workload(Strict):
    """A whole training run of `replicas` replicas that all follow `program`."""

    name: str = "workload"
    replicas: Count
    exchanges: dict[str, Exchange] = Field(default_factory=dict)
    program: list[Block] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        running = dict.fromkeys(self.exchanges, 0)
        for number, block in enumerate(self.program):
            before = dict(running)
            for operation in block.body:
                self._follow(operation, running, number)
            unequal = [name for name in running if running[name] != before[name]]
            if block.repeat > 1 and unequal:
                raise ValueError(
                    f"program.{number}: exchange {unequal[0]!r} is launched and awaited unequally often in a block"
                    f" that repeats {block.repeat} times, allowed is as many launches as waits"
                )
        left = [name for name, count in running.items() if count]
        if left:
            raise ValueError(
                f"program: exchange {left[0]!r} is launched and never awaited, allowed is a wait"
            )
        return self

    def _follow(self, operation: Operation, running: dict[str, int], block: int) -> None:
        if not isinstance(operation, Launch | Wait):
            return
        name = operation.exchange
        if name not in self.exchanges:
            known = ", ".join(self.exchanges) or "none is defined"
            raise ValueError(f"program.{block}: found the exchange {name!r}, allowed: {known}")
        running[name] += 1 if isinstance(operation, Launch) else -1
        if running[name] < 0:
            raise ValueError(f"program.{block}: waits for {name!r}, which is not running there")

    @property
    def tokens(self) -> int:
        """Tokens that all replicas together train on."""
        per_replica = sum(
            block.repeat * operation.count * operation.tokens
            for block in self.program
            for operation in block.body
            if isinstance(operation, Steps)
        )
        return self.replicas * per_replica

    @property
    def steps(self) -> int:
        """Training steps of each replica."""
        return sum(
            block.repeat * operation.count
            for block in self.program
            for operation in block.body
            if isinstance(operation, Steps)
        )

    @property
    def sent_bytes(self) -> int:
        """Payload that each replica hands to its transport over the whole run."""
        return sum(
            block.repeat * self.exchanges[operation.exchange].sent_bytes(self.replicas)
            for block in self.program
            for operation in block.body
            if isinstance(operation, Launch)
        )

    @property
    def compute_s(self) -> float:
        """Seconds of `steps` at pace 1."""
        return sum(
            block.repeat * operation.count * operation.seconds
            for block in self.program
            for operation in block.body
            if isinstance(operation, Steps)
        )

    def to_json(self) -> str:
        """As JSON text that `load_workload` reads."""
        return json.dumps(self.model_dump(mode="json"), indent=1)


def load_workload(path: str | Path) -> Workload:
    """Reads a workload from YAML or JSON.

    Raises:
        TopologyError: one sentence with file, key, found and allowed.
    """
    path = Path(path)
    data = load_yaml(path)  # JSON is YAML
    try:
        return Workload.model_validate(data)
    except ValidationError as error:
        raise TopologyError(sentence(error, Workload, str(path))) from error
