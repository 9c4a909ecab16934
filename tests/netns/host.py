"""The host as a comparable value, and commands of ours as subprocesses."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

DILOCOX = [sys.executable, "-m", "experiments.cli"]

_started: list["subprocess.Popen[str]"] = []


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout


def processes() -> set[str]:
    """Command lines of processes that carry any session's mark, or that Mininet would have made."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            marked = b"DILOCOX_SESSION=" in (entry / "environ").read_bytes()
        except OSError:
            continue
        if marked or "mininet:" in command or "delayline" in command:
            found.add(f"{entry.name} {command}")
    return found


def firewall() -> str:
    """Rules, chains and policies; without tables that hold none, which `iptables` makes when it is first asked."""
    tables: dict[str, list[str]] = {}
    for line in _output("iptables-save").splitlines():
        if line.startswith("*"):
            table = tables.setdefault(line, [])
        elif line[:1] == "-" or (line[:1] == ":" and " ACCEPT " not in line):
            table.append(line.split(" [")[0])
    return "\n".join(f"{name} {rule}" for name, rules in tables.items() for rule in rules)


def snapshot() -> dict[str, str]:
    """Everything about the host that a run could have left changed."""
    cgroups = sorted(
        str(p) for p in Path("/sys/fs/cgroup").glob("*/*") if p.is_dir()
    )  # deeper ones: other people's
    sessions = sorted(p.name for p in Path("/run/dilocox").iterdir()) if Path("/run/dilocox").is_dir() else []
    sysctls = ["net.core.rmem_max", "net.core.wmem_max", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"]
    sysctls += ["net.ipv4.ip_forward", "net.ipv4.tcp_slow_start_after_idle", "fs.file-max", "kernel.pty.max"]
    return {
        "links": _output("ip", "-o", "link"),
        "netns": _output("ip", "netns"),
        "qdiscs": _output("tc", "qdisc", "show"),
        "routes": _output("ip", "route", "show", "table", "all"),
        "iptables": firewall(),
        "mounts": Path("/proc/self/mounts").read_text(encoding="utf-8"),
        "hosts": Path("/etc/hosts").read_text(encoding="utf-8"),
        "cgroups": "\n".join(cgroups),
        "sysctls": _output("sysctl", *sysctls),
        "sessions": "\n".join(sessions),
        "processes": "\n".join(sorted(processes())),
    }


def start(*arguments: str, **params: object) -> "subprocess.Popen[str]":
    """Starts a dilocox command; what a failing test leaves of it, `stop_what_is_left` ends."""
    process = subprocess.Popen(
        [*DILOCOX, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **params,
    )
    _started.append(process)
    return process


def stop_what_is_left() -> None:
    """Ends the commands that a failed test did not see to their end, so that the next test starts from a clean host."""
    alive = [process for process in _started if process.poll() is None]
    _started.clear()
    for process in alive:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if alive:
        dilocox("clean")


def dilocox(*arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess:
    """Runs a dilocox command to its end."""
    return subprocess.run(
        [*DILOCOX, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def wait_for(condition, timeout_s: float, what: str) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)


def stop(process: subprocess.Popen, number: int = signal.SIGINT, timeout_s: float = 5.0) -> float:
    """Sends a signal and waits; returns the seconds until the end."""
    began = time.monotonic()
    os.kill(process.pid, number)
    process.wait(timeout=timeout_s)
    return time.monotonic() - began
