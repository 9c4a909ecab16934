"""What can this machine do? Each thing is tried for real in a scratch namespace, and what fails comes with its cure."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from testbed.errors import TestbedError
from testbed.nodes.limits import try_limit
from testbed.nodes.settings import NodeSettings
from testbed.session import Session
from testbed.shaping.delayline import DelayLine

PACKAGES = "mininet iproute2 iptables ethtool iperf3 iputils-ping util-linux coreutils"
TRY_TIMEOUT_S = 15


@dataclass(frozen=True)
class Check:
    """One finding: ``required`` ones must hold; ``mend`` is the exact line that would make it hold."""

    name: str
    ok: bool
    required: bool
    detail: str
    mend: str = ""


def in_scratch(script: str) -> tuple[bool, str]:
    """Runs a shell script in a new network and mount namespace that vanishes with it."""
    try:
        done = subprocess.run(
            ["unshare", "--net", "--mount", "sh", "-euc", script],
            capture_output=True,
            text=True,
            timeout=TRY_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return done.returncode == 0, said[-1] if said else ""


_VETH = "ip link add name xa type veth peer name xb; ip link set xa up; ip link set xb up\n"


@cache
def netem_works() -> tuple[bool, str]:
    """Whether a netem delay can be set *and* reads back."""
    return in_scratch(
        _VETH
        + "tc qdisc add dev xa root netem delay 10ms limit 1000; tc qdisc show dev xa | grep -q 'delay 10ms'"
    )


@cache
def iptables_command() -> str:
    """The first iptables that can add an NFQUEUE rule; they differ by back end, and not every kernel has both."""
    for command in ("iptables", "iptables-nft", "iptables-legacy"):
        if not shutil.which(command):
            continue
        ok, _ = in_scratch(
            _VETH + f"{command} -w 5 -t mangle -A FORWARD -i xa -o xb -j NFQUEUE --queue-num 0"
        )
        if ok:
            return command
    raise TestbedError(f"no iptables here can add an NFQUEUE rule: apt-get install {PACKAGES}")


@cache
def nfqueue_works() -> tuple[bool, str]:
    """Whether an NFQUEUE rule can be added and a queue bound, in a scratch namespace."""
    try:
        iptables_command()
    except TestbedError as error:
        return False, str(error)
    ok, said = in_scratch(f"'{sys.executable}' -c 'from testbed.doctor import bind_once; bind_once()'")
    return ok, said


def bind_once() -> None:
    """Binds one queue and lets it go (called in the scratch namespace)."""
    DelayLine({0: (1.0, 0.0, 0.0)}, 16, stats=None).sock.close()  # type: ignore[arg-type]


def choose_delay(asked: Literal["auto", "netem", "nfqueue"]) -> Literal["netem", "nfqueue"]:
    """netem where it works, else the NFQUEUE line; a forced choice that does not work is an error.

    Raises:
        TestbedError: with the reason why the asked one, or both, cannot be had.
    """
    require_root()
    reasons = []
    tries: list[tuple[Literal["netem", "nfqueue"], Callable[[], tuple[bool, str]]]] = [
        ("netem", netem_works),
        ("nfqueue", nfqueue_works),
    ]
    for name, works in tries:
        if asked in ("auto", name):
            ok, said = works()
            if ok:
                return name
            reasons.append(f"{name}: {said}")
    raise TestbedError(f"delays cannot be made here ({'; '.join(reasons)}); see: dilocox doctor")


def require_root() -> None:
    """Raises TestbedError unless this is root with the tools that build networks."""
    if os.geteuid() != 0:
        raise TestbedError("building a network needs root: run as root or with sudo")
    for tool in (
        "mnexec",
        "ip",
        "tc",
        "iptables",
        "setpriv",
        "unshare",
        "nsenter",
        "ping",
        "iperf3",
        "ss",
        "stdbuf",
        "chrt",
    ):
        if not shutil.which(tool):
            raise TestbedError(f"{tool} is missing: apt-get install {PACKAGES}")


def _tool(name: str, package: str) -> Check:
    path = shutil.which(name)
    return Check(f"tool {name}", bool(path), True, path or "not found", f"apt-get install {package}")


def examine() -> list[Check]:
    """All checks, in an order in which the first failure explains the later ones."""
    root = os.geteuid() == 0
    checks = [Check("root", root, True, f"uid {os.geteuid()}", "sudo dilocox doctor")]
    for name, package in (
        ("mnexec", "mininet"),
        ("ip", "iproute2"),
        ("tc", "iproute2"),
        ("ss", "iproute2"),
        ("iptables", "iptables"),
        ("ethtool", "ethtool"),
        ("iperf3", "iperf3"),
        ("ping", "iputils-ping"),
        ("unshare", "util-linux"),
        ("nsenter", "util-linux"),
        ("setpriv", "util-linux"),
        ("chrt", "util-linux"),
        ("stdbuf", "coreutils"),
    ):
        checks.append(_tool(name, package))
    tcpdump = shutil.which("tcpdump")
    checks.append(
        Check("tool tcpdump", bool(tcpdump), False, tcpdump or "needed for --pcap", "apt-get install tcpdump")
    )
    if not root or not shutil.which("unshare"):
        return checks
    ok, said = in_scratch(_VETH)
    checks.append(
        Check("veth in a namespace", ok, True, said or "made", "run on the host or in a privileged container")
    )
    ok, said = in_scratch(
        _VETH + "tc qdisc add dev xa root handle 1: htb default 10\n"
        "tc class add dev xa parent 1: classid 1:10 htb rate 1gbit burst 125000 quantum 60000\n"
        "tc class show dev xa | grep -q 'rate 1Gbit'"
    )
    checks.append(Check("tc htb", ok, True, said or "set and read back", "modprobe sch_htb"))
    netem, netem_said = netem_works()
    queue, queue_said = nfqueue_works()
    either = netem or queue
    checks += [
        Check("delay by netem", netem, not either, netem_said or "set and read back", "modprobe sch_netem"),
        Check(
            "delay by NFQUEUE",
            queue,
            not either,
            queue_said or f"rule added, queue bound ({iptables_command()})" if queue else queue_said,
            "modprobe nfnetlink_queue xt_NFQUEUE",
        ),
    ]
    ok, said = in_scratch("chrt -f 50 true")
    checks.append(Check("real-time priority", ok, queue and not netem, said or "granted", "run as real root"))
    ok, said = in_scratch("ip link set lo up; timeout -s INT 0.2 ss -EtinH || test $? = 124")
    checks.append(Check("socket events (ss -E)", ok, True, said or "listening works", "modprobe tcp_diag"))
    return checks + _limits()


def _limits() -> list[Check]:
    """Each kind of node limit, tried in a scratch group; nothing needs them unless a topology asks."""
    checks = []
    for key, settings in (
        ("cpus", NodeSettings(cpus=0.5)),
        ("cpuset", NodeSettings(cpuset="0")),
        ("memory_mb", NodeSettings(memory_mb=64)),
    ):
        with Session("doctor") as session:
            ok, said = try_limit(settings, session.id, session.folder)
        mend = "mount -t cgroup2 none /sys/fs/cgroup, or run on the host itself"
        checks.append(Check(f"limit {key}", ok, False, said, mend))
    return checks
