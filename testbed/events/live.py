"""Makes the kernel follow a changed plan while packets flow, and reads back that it did.

Rates: ``tc class change`` through one ``tc -batch`` process a namespace that stays open (an exec costs more than the
change). Delay, jitter and loss: the delay line's control, or ``tc qdisc change`` of netem. What is down: packets are
dropped in a router's mangle table before anything else sees them, so that a sender hears nothing at all, neither a
reset nor an ICMP message nor a lost carrier; what is already in the delay line still arrives.
"""

import os
import re
import select
import subprocess
import time
from types import TracebackType
from typing import Any, Self

from testbed.doctor import iptables_command
from testbed.errors import TestbedError
from testbed.network import Network
from testbed.nodes.namespace import NamespaceNode
from testbed.plan import CORE, Cut, NetworkPlan
from testbed.shaping import lines, netem, nfqueue, paths, rate

ANSWER_TIMEOUT_S = 5.0
_END_OF_ANSWER = "qdisc show dev lo"
_END_LINE = r"^qdisc \S+ 0: (?:dev lo )?root.*\n"
"""The loopback's queue has one line, which nothing else that is shown looks like."""


class OpenTc:
    """``tc -batch`` in a namespace: takes commands, and answers with what the kernel then shows."""

    def __init__(self, node: NamespaceNode) -> None:
        self._name = node.name
        self._process: subprocess.Popen[Any] = node.start_root(
            ["stdbuf", "-oL", "tc", "-batch", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )

    def change(self, commands: list[str], show: list[str]) -> list[str]:
        """Runs commands, then shows: one answer for each of ``show``.

        Raises:
            TestbedError: with what tc said where it did not take a command, or it does not answer.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise TestbedError(f"{self._name}: tc has no pipes")
        # without anything to show, the end alone says that the commands were done
        asked = [line for one in show for line in (one, _END_OF_ANSWER)] or [_END_OF_ANSWER]
        try:
            stdin.write(("\n".join(commands + asked) + "\n").encode())
        except BrokenPipeError as error:
            raise TestbedError(f"{self._name}: tc died") from error
        answers, said = [""], b""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while len(answers) <= max(1, len(show)):
            if not select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TestbedError(f"{self._name}: tc does not answer within {ANSWER_TIMEOUT_S:g} s")
            data = os.read(stdout.fileno(), 65_536)
            if not data:
                problem = "; ".join(said.decode(errors="replace").split("\n")).strip("; ")
                raise TestbedError(f"{self._name}: tc: {problem or 'it died'}")
            said += data
            answers = re.split(_END_LINE, said.decode(errors="replace"), flags=re.MULTILINE)
        return answers[: len(show)]

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()


class Live:
    """Changes a network that is up. One thread at a time."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._tc: dict[str, OpenTc] = {}
        self._iptables = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tc in self._tc.values():
            tc.close()
        self._tc.clear()

    def follow(self, plan: NetworkPlan) -> float:
        """Makes the network that of ``plan`` and reads it back; returns how long packets of before are still under way.

        Raises:
            TestbedError: a change was refused, or the kernel reports something else. The network is in neither state.
        """
        old, network = self._network.now, self._network
        self._shape(old, plan)
        settles_s = self._delay(old, plan) if network.delay == "nfqueue" else 0.0
        self._cut(old.cuts, plan.cuts)
        network.now = plan
        return settles_s

    def _shape(self, old: NetworkPlan, new: NetworkPlan) -> None:
        for owner, commands in lines.changes(old, new, self._network.delay).items():
            changed = [
                link
                for was, link in zip(old.links, new.links, strict=True)
                if was != link and link.owner == owner
            ]
            show = [f"class show dev {link.interface}" for link in changed]
            if owner not in self._tc:
                self._tc[owner] = OpenTc(self._network.nodes[owner])
            try:
                shown = self._tc[owner].change(commands, show)
            except TestbedError:
                self._tc.pop(owner).close()
                raise
            for link, part in zip(changed, shown, strict=True):
                rate.verify(link, part)
                ceilings = {
                    minor: path.ceil_mbps
                    for path, minor in paths.classes(new)
                    if path.link == link.name and (path.own_class or self._network.delay == "netem")
                }
                rate.verify_ceilings(f"paths over {link.name}", ceilings, part)
        if self._network.delay == "netem" and old.delays != new.delays:
            netem.verify(new, self._network.nodes[CORE].run(["tc", "-j", "qdisc", "show"]))

    def _delay(self, old: NetworkPlan, new: NetworkPlan) -> float:
        figures = {
            queue.number: (queue.delay_ms, queue.jitter_ms, queue.loss)
            for was, queue in zip(nfqueue.queues(old), nfqueue.queues(new), strict=True)
            if was != queue
        }
        if not figures:
            return 0.0
        if self._network.delay_control is None:
            raise TestbedError("the delay line was never started")
        return self._network.delay_control.set(figures).settles_s

    def _cut(self, old: frozenset[Cut], new: frozenset[Cut]) -> None:
        if old == new:
            return
        self._iptables = self._iptables or iptables_command()
        for owner in sorted({cut.owner for cut in old ^ new}):
            node = self._network.nodes[owner]
            for cut in sorted((new - old) | (old - new), key=str):
                if cut.owner == owner:
                    node.run(self._rule(cut, add=cut in new))
            rules = node.run([self._iptables, "-w", "5", "-t", "mangle", "-S", "FORWARD"]).splitlines()
            drops = {_as_listed(rule) for rule in rules if rule.endswith("-j DROP")}
            wanted = {_as_listed(" ".join(_match(cut))) for cut in new if cut.owner == owner}
            if drops != wanted:
                raise TestbedError(
                    f"{owner}: asked to drop {sorted(wanted)}, the kernel reports {sorted(drops)}"
                )

    def _rule(self, cut: Cut, *, add: bool) -> list[str]:
        place = ["-I", "FORWARD", "1"] if add else ["-D", "FORWARD"]
        return [self._iptables, "-w", "5", "-t", "mangle", *place, *_match(cut), "-j", "DROP"]


def _match(cut: Cut) -> list[str]:
    found = ["-i", cut.from_interface] if cut.from_interface else []
    return found + (["-o", cut.to_interface] if cut.to_interface else [])


def _as_listed(rule: str) -> str:
    return rule.removeprefix("-A FORWARD ").removesuffix("-j DROP").strip()
