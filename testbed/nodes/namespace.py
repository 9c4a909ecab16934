"""A node as a Mininet host: own network and mount namespace, private /tmp, own /etc/hosts, programs unprivileged.

Every program gets a PID namespace besides, so that its whole process tree dies with it.
"""

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mininet.node import Node

from testbed.errors import TestbedError
from testbed.nodes.limits import NodeGroup
from testbed.session import Session

COMMAND_TIMEOUT_S = 20


@dataclass(frozen=True)
class User:
    """Whom programs run as."""

    uid: int
    gid: int

    @staticmethod
    def invoking() -> "User":
        """The user behind sudo; ``nobody`` when root itself asks, for root never trains."""
        uid, gid = int(os.environ.get("SUDO_UID", "0")), int(os.environ.get("SUDO_GID", "0"))
        return User(uid, gid) if uid else User(65534, 65534)

    def can_enter(self, folder: Path) -> bool:
        """Whether this user may pass through a folder (owner, group and other bits)."""
        status = folder.stat()
        shift = 6 if status.st_uid == self.uid else 3 if status.st_gid == self.gid else 0
        return bool(status.st_mode >> shift & 0o1)


class NamespaceNode(Node):  # type: ignore[misc]
    """A Mininet node of one session: a shell that keeps the namespaces alive, and programs beside it."""

    def __init__(self, name: str, session: Session | None = None, **params: Any) -> None:
        if session is None:
            raise TypeError("a NamespaceNode belongs to a session")
        self.session = session
        self.group: NodeGroup | None = None  # its limits, where it has any
        super().__init__(name, inNamespace=True, **params)

    def _popen(self, cmd: list[str], **params: Any) -> Any:
        """Mininet's one way of starting processes: here each carries the session's mark."""
        params.setdefault("env", self.session.environment)
        # the first is the shell that holds the namespaces: its host name is the node's, and nobody else's
        named = (
            [] if self.shell else ["unshare", "--uts", "sh", "-euc", 'hostname "$0"; exec "$@"', self.name]
        )
        return super()._popen(["setpriv", "--pdeathsig", "KILL", *named, *cmd], **params)

    def terminate(self) -> None:
        """Kills the shell, and with it (once the programs are dead too) the namespaces."""
        if self.shell and self.shell.poll() is None:
            os.killpg(self.shell.pid, signal.SIGKILL)
        self.cleanup()

    def run(self, command: list[str], text: str | None = None, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Runs a command as root in the node and returns its output.

        Raises:
            TestbedError: a status other than 0 (with what the command said), or no end within ``timeout_s``.
        """
        try:
            done = subprocess.run(
                ["mnexec", "-a", str(self.pid), *command],
                input=text,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env=self.session.environment,
                cwd="/",  # ours may not exist in the node, which has a /tmp of its own
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TestbedError(f"{self.name}: {' '.join(command)}: no end within {timeout_s:g} s") from error
        if done.returncode:
            said = (done.stderr or done.stdout).strip().replace("\n", "; ")
            raise TestbedError(f"{self.name}: {' '.join(command)}: status {done.returncode}: {said}")
        return done.stdout

    def batch(self, tool: str, lines: list[str]) -> None:
        """Feeds ``ip -batch`` or ``tc -batch``; the first line that fails is an error."""
        if lines:
            self.run([tool, "-batch", "-"], text="\n".join(lines) + "\n")

    def start_root(self, command: list[str], **params: Any) -> "subprocess.Popen[str]":
        """Starts a helper as root in the node (probe, delay line, counters); dies with us."""
        return self._start(command, **{"cwd": "/", **params})

    def start_program(
        self, command: list[str], user: User, env: dict[str, str], output: IO[bytes] | int, cwd: Path
    ) -> "subprocess.Popen[str]":
        """Starts a program unprivileged in its own PID namespace; its process tree dies with it."""
        wrapped = ["unshare", "--pid", "--fork", "--mount-proc"]
        wrapped += ["setpriv", "--reuid", str(user.uid), "--regid", str(user.gid), "--clear-groups"]
        # not unshare's --kill-child: the kernel forgets it at the change of user
        wrapped += ["--pdeathsig", "KILL"]
        wrapped += ["--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all", "--"]
        # A shell is the namespace's init: it reaps, and says 128 + n of a program that signal n killed, which
        # unshare of util-linux 2.38 turns into status 1 ("sigprocmask unblock failed") for its own child.
        wrapped += ["sh", "-c", '"$@"; exit $?', "init"]
        return self._start(
            wrapped + command,
            group=self.group,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**self.session.environment, **env},
            cwd=cwd,
            text=True,
        )

    def _start(
        self, command: list[str], group: NodeGroup | None = None, **params: Any
    ) -> "subprocess.Popen[str]":
        # mnexec knows no UTS namespace, and the control groups are out of sight once it has mounted its /sys
        entering = ["nsenter", "--target", str(self.pid), "--uts", "mnexec", "-da", str(self.pid)]
        joining = group.joining() if group else []
        process: subprocess.Popen[str] = self._popen([*joining, *entering, *command], **params)
        return process

    def make_private(self, hosts_file: Path, empty_file: Path, exposed: list[Path], user: User) -> None:
        """Gives the node its own /etc/hosts, no resolver, and a /tmp of its own.

        Folders in ``exposed`` stay reachable for ``user`` at their own paths, also below /tmp and below folders
        that the user may not enter (a Python under /root): those are covered by an empty folder in which only
        the exposed ones exist. Nothing outside this node's mount namespace changes.
        """
        script = [f"mount --bind '{hosts_file}' /etc/hosts"]
        if Path("/etc/nsswitch.conf").exists():
            script.append(f"mount --bind '{_names_from_files_only(self.session.folder)}' /etc/nsswitch.conf")
        if Path("/etc/resolv.conf").exists():
            script.append(f"mount --bind '{empty_file}' /etc/resolv.conf")
        covers = {Path("/tmp")} | {c for path in exposed if (c := _closed_ancestor(path, user))}  # noqa: S108
        covers = {c for c in covers if not any(c.is_relative_to(other) for other in covers - {c})}
        hidden = [p for p in exposed if any(p.is_relative_to(c) for c in covers)]
        stash = self.session.folder / "stash"
        stash.mkdir(exist_ok=True)
        script.append(f"mount -t tmpfs -o mode=0700 stash '{stash}'")
        for n, path in enumerate(hidden):
            script += [f"mkdir '{stash}/{n}'", f"mount --rbind '{path}' '{stash}/{n}'"]
        for cover in sorted(covers):
            mode = "1777" if cover == Path("/tmp") else "0755"  # noqa: S108
            script.append(f"mount -t tmpfs -o mode={mode},size=2g cover '{cover}'")
        for n, path in enumerate(hidden):
            script += [f"mkdir -p '{path}'", f"mount --rbind '{stash}/{n}' '{path}'"]
        script.append(f"umount -l '{stash}'")
        self.run(["sh", "-euc", "\n".join(script)])


def _names_from_files_only(folder: Path) -> Path:
    """A copy of /etc/nsswitch.conf whose hosts come from /etc/hosts alone: no resolver of the host is asked."""
    path = folder / "nsswitch.conf"
    if not path.exists():
        lines = Path("/etc/nsswitch.conf").read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if not line.lstrip().startswith("hosts:")]
        path.write_text("\n".join([*kept, "hosts: files"]) + "\n", encoding="utf-8")
    return path


def _closed_ancestor(path: Path, user: User) -> Path | None:
    """The topmost ancestor of a path that the user may not enter."""
    for ancestor in [*reversed(path.parents)]:
        if not user.can_enter(ancestor):
            return ancestor
    return None


def check_shell_safe(path: Path) -> Path:
    """Paths are quoted with ' in the mount script; one that contains ' is refused."""
    if "'" in str(path):
        raise TestbedError(f"{path}: allowed are paths without a quotation mark")
    return path
