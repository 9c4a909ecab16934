"""Replicas that follow a workload's program, each a SimPy process; and what came out, by replica."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator
from functools import partial
from typing import Any

import simpy

from testbed.errors import TestbedError
from testbed.simulation.conditions import Conditions, Outage, Outcome, Replica
from testbed.simulation.fluid import FluidNetwork
from testbed.simulation.links import Links
from testbed.simulation.steady import Mark, period_of
from testbed.workload import Block, Busy, Exchange, Launch, Operation, Phase, Steps, Workload


def simulate(
    workload: Workload, links: Links, conditions: Conditions | None = None, *, repeat_steady: bool = True
) -> Outcome:
    """Runs the workload.

    With `repeat_steady` a block whose iterations have become equal on all replicas is not simulated to its
    end: the rest is added. That changes nothing but rounding, and a test holds it to that; it is not done
    where jitter, outages or failures make rounds differ.

    Raises:
        TestbedError: fewer sites than replicas, or a run that can never end (a link that stays down).
    """
    if workload.replicas > 1 and links.sites < workload.replicas:
        raise TestbedError(
            f"workload {workload.name}: found {workload.replicas} replicas, allowed are at most the"
            f" {links.sites} sites of the network"
        )
    conditions = conditions or Conditions()
    return _Simulation(workload, links, conditions, repeat_steady and conditions.steady).run()


class _Simulation:
    def __init__(self, workload: Workload, links: Links, conditions: Conditions, repeat: bool) -> None:
        self.workload, self.conditions, self.repeat = workload, conditions, repeat
        self.environment = simpy.Environment()
        self.network = FluidNetwork(self.environment, links)
        self.replicas = [Replica() for _ in range(workload.replicas)]
        self.pace = [1.0] * workload.replicas
        for straggler in conditions.stragglers:
            self.pace[straggler.replica] = straggler.pace
        self.rng = [random.Random(f"{conditions.seed}:{i}") for i in range(workload.replicas)]
        self.arrivals: dict[tuple[Any, ...], simpy.Event] = {}
        self.launched = [0] * workload.replicas
        self.marks: dict[int, list[list[Mark]]] = {}  # of each block, by replica
        self.decided: dict[int, int] = {}  # block -> iterations to simulate
        self.added_s = 0.0
        self.repeated = 0
        self.ended = [0.0] * workload.replicas

    def run(self) -> Outcome:
        """To the end."""
        environment = self.environment
        processes = [environment.process(self._replica(index)) for index in range(self.workload.replicas)]
        for outage in self.conditions.outages:
            environment.process(self._outage(outage))
        done = environment.all_of(processes)
        events = 0
        while not done.processed:
            try:
                environment.step()
            except simpy.core.EmptySchedule:
                raise TestbedError(
                    f"workload {self.workload.name}: at {environment.now:.3f} s nothing can go on any more"
                    " (a link that stays down?)"
                ) from None
            events += 1
        wall_s = max(self.ended)
        return Outcome(
            wall_s + self.added_s,
            self.workload.tokens,
            self.workload.steps,
            tuple(self.replicas),
            events,
            self.repeated,
        )

    def _replica(self, index: int) -> Generator[simpy.Event, Any, None]:
        running: dict[str, deque[simpy.Event]] = {name: deque() for name in self.workload.exchanges}
        for number, block in enumerate(self.workload.program):
            iteration = 0
            while iteration < self._iterations(number, block):
                for operation in block.body:
                    yield from self._operate(index, operation, running)
                iteration += 1
                self._mark(number, block, index)
        self.ended[index] = self.environment.now

    def _iterations(self, number: int, block: Block) -> int:
        return self.decided.get(number, block.repeat)

    def _operate(
        self, index: int, operation: Operation, running: dict[str, deque[simpy.Event]]
    ) -> Generator[simpy.Event, Any, None]:
        environment, replica = self.environment, self.replicas[index]
        if isinstance(operation, Steps):
            seconds = self._step_seconds(index, operation)
            replica.compute_s += seconds
            yield environment.timeout(self._with_pauses(index, seconds))
        elif isinstance(operation, Busy):
            replica.busy_s += operation.seconds
            yield environment.timeout(operation.seconds)
        elif isinstance(operation, Launch):
            exchange = self.workload.exchanges[operation.exchange]
            number, self.launched[index] = self.launched[index], self.launched[index] + 1
            running[operation.exchange].append(environment.process(self._exchange(index, exchange, number)))
        else:
            began = environment.now
            yield running[operation.exchange].popleft()
            replica.exposed_comm_s += environment.now - began

    def _step_seconds(self, index: int, steps: Steps) -> float:
        sigma, pace = self.conditions.jitter_sigma, self.pace[index]
        if not sigma:
            return steps.count * steps.seconds * pace
        rng = self.rng[index]
        return sum(
            steps.seconds * pace * rng.lognormvariate(-sigma * sigma / 2, sigma) for _ in range(steps.count)
        )

    def _with_pauses(self, index: int, seconds: float) -> float:
        """How long it takes from now to compute for `seconds`, with the replica's failures in between."""
        now = time = self.environment.now
        pauses = sorted((p for p in self.conditions.pauses if p.replica == index), key=lambda p: p.at_s)
        for pause in pauses:
            over = pause.at_s + pause.for_s
            if over <= time or pause.at_s >= time + seconds:
                continue
            seconds -= max(pause.at_s - time, 0.0)
            time = over
        return time + seconds - now

    def _exchange(self, index: int, exchange: Exchange, number: int) -> Generator[simpy.Event, Any, None]:
        began, members = self.environment.now, self.workload.replicas
        for order, phase in enumerate(exchange.phases):
            if phase.work_s:
                yield self.environment.timeout(phase.work_s)
            if members > 1 and phase.message_bytes:
                for turn in range(phase.times):
                    yield self._turn(index, exchange, phase, (number, order, turn))
            self.replicas[index].sent_bytes += phase.sent_bytes(members)
        self.replicas[index].comm_s += self.environment.now - began

    def _turn(self, index: int, exchange: Exchange, phase: Phase, turn: tuple[int, int, int]) -> simpy.Event:
        """Sends this member's messages of one turn; the event: they have left, and all incoming ones are there."""
        members = self.workload.replicas
        if phase.pattern == "everyone":
            targets = sources = [other for other in range(members) if other != index]
        elif phase.pattern == "ring":
            targets, sources = [(index + 1) % members], [(index - 1) % members]
        else:
            partner = self._partner(index, turn[0])
            targets = sources = [] if partner is None else [partner]
        awaited = [self._arrival((*turn, source, index)) for source in sources]
        for target in targets:
            departed, arrived = self.network.send(
                index, target, phase.message_bytes, streams=exchange.streams, window_bytes=phase.window_bytes
            )
            key = (*turn, index, target)
            self.network.then(arrived, partial(self._deliver, key))
            awaited.append(departed)
        return self.environment.all_of(awaited)

    def _deliver(self, key: tuple[Any, ...]) -> None:
        self._arrival(key).succeed()

    def _arrival(self, key: tuple[Any, ...]) -> simpy.Event:
        """The event of one message; whoever comes second, sender or receiver, forgets it."""
        if (event := self.arrivals.pop(key, None)) is None:
            event = self.arrivals[key] = self.environment.event()
        return event

    def _partner(self, index: int, number: int) -> int | None:
        """Everybody's partner in exchange `number`, the same from all sides; one of an odd number has none."""
        order = list(range(self.workload.replicas))
        random.Random(f"{self.conditions.seed}:pairs:{number}").shuffle(order)
        place = order.index(index) ^ 1
        return order[place] if place < len(order) else None

    def _outage(self, outage: Outage) -> Generator[simpy.Event, Any, None]:
        yield self.environment.timeout(outage.at_s)
        self.network.weaken(outage.link, outage.factor)
        yield self.environment.timeout(outage.for_s)
        self.network.mend(outage.link, outage.factor)

    def _mark(self, number: int, block: Block, index: int) -> None:
        """After an iteration: leave the rest out once all replicas' iterations come again."""
        if not self.repeat or number in self.decided:
            return
        marks = self.marks.setdefault(number, [[] for _ in self.replicas])
        marks[index].append(Mark(self.environment.now, self.replicas[index].values()))
        reached = len(marks[index])
        if reached == block.repeat or any(len(mine) != reached for mine in marks):
            return
        if period := period_of(marks):
            self._leave_out(number, block, marks, reached, period)

    def _leave_out(
        self, number: int, block: Block, marks: list[list[Mark]], reached: int, period: int
    ) -> None:
        # whoever marked first is already inside the next iteration: all finish that one
        periods = (block.repeat - reached - 1) // period
        self.decided[number] = block.repeat - periods * period
        self.repeated += periods * period
        self.added_s += periods * (marks[0][-1].now - marks[0][-1 - period].now)
        for replica, mine in zip(self.replicas, marks, strict=True):
            before, after = mine[-1 - period].values, mine[-1].values
            gained = [periods * (y - x) for x, y in zip(before, after, strict=True)]
            replica.compute_s += gained[0]
            replica.busy_s += gained[1]
            replica.exposed_comm_s += gained[2]
            replica.comm_s += gained[3]
            replica.sent_bytes += round(gained[4])
