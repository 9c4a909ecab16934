"""Realises a Topology with Mininet: nodes, routers and core as namespaces, links shaped and read back."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from mininet.link import Link as MininetLink
from mininet.net import Mininet

from testbed.attach import describe
from testbed.doctor import choose_delay, iptables_command
from testbed.errors import NetworkBroke, ProgramFailed, TestbedError
from testbed.nodes.limits import NodeGroup, check_possible, find_hierarchies, make_groups
from testbed.nodes.namespace import NamespaceNode, User, check_shell_safe
from testbed.plan import CONTROL_PORT, CORE, NODE_INTERFACE, NetworkPlan, plan_network
from testbed.session import Session
from testbed.shaping import lines, netem, nfqueue, paths, rate
from testbed.shaping.control import DelayControl
from testbed.topology import Topology

READY_TIMEOUT_S = 10.0
PROJECT = Path(__file__).resolve().parent.parent


def delay_asked(topology: Topology) -> Literal["auto", "netem", "nfqueue"]:
    """How delays are to be made. netem reorders packets with jitter, and once when a delay is shortened."""
    changes_rtt = any(event.do == "rtt" for event in topology.events)
    return "nfqueue" if topology.jitters or (changes_rtt and topology.delay == "auto") else topology.delay


class Network:
    """A topology that is up: a context manager; leaving it takes everything down.

    Attributes:
        plan: what was made.
        now: the same with the figures of this moment (events change them).
        delay: how delays are made here, ``netem`` or ``nfqueue``.
        net: the Mininet object (its command line works on it).
        nodes: name -> node, for nodes, routers and the core.
    """

    def __init__(
        self, topology: Topology, expose: list[Path] | None = None, user: User | None = None
    ) -> None:
        self.plan: NetworkPlan = plan_network(topology)
        self.now = self.plan
        self.topology = topology
        self.user = user or User.invoking()
        asked = delay_asked(topology)
        self.delay = choose_delay(asked) if self.plan.delays else "none"
        self.session = Session(f"network {topology.name}")
        interpreter = [Path(sys.base_prefix), Path(sys.prefix), PROJECT]
        self.exposed = [check_shell_safe(p.resolve()) for p in [*interpreter, *(expose or [])]]
        self.nodes: dict[str, NamespaceNode] = {}
        self.groups: dict[str, NodeGroup] = {}  # of the nodes that have limits
        self._settings = {node: topology.settings(node) for node in topology.nodes}
        if any(settings.limited for settings in self._settings.values()):
            check_possible(self._settings, find_hierarchies())
        self.net: Mininet
        self.tcp_settings: dict[str, dict[str, str]] = {}  # node -> what the kernel says it has
        self.delay_line: subprocess.Popen[str] | None = None
        self.delay_control: DelayControl | None = None
        self.delay_stats_file = self.session.folder / "delayline.json"

    def __enter__(self) -> Self:
        try:
            self.session.__enter__()
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A signal that comes while we take things down must not stop half-way; it is delivered afterwards.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            # All processes first, at once: the kernel takes the namespaces down with the last of them.
            self.session.__exit__(kind, value, trace)
            for node in self.nodes.values():
                node.terminate()
            self.nodes.clear()
            if self.delay_line is not None:
                self.delay_line.wait(timeout=READY_TIMEOUT_S)
            if self.delay_control is not None:
                self.delay_control.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _build(self) -> None:
        Mininet.inited = (
            True  # its init() would raise limits and set sysctls on the host; we change nothing there
        )
        self.net = Mininet(topo=None, controller=None, build=False, link=MininetLink)
        self.groups = make_groups(self.session.id, self.session.folder, self._settings)
        for name in self.plan.namespaces:
            self.nodes[name] = self.net.addHost(name, cls=NamespaceNode, session=self.session, ip=None)
            self.nodes[name].group = self.groups.get(name)
        for veth in self.plan.veths:
            link = self.net.addLink(
                self.nodes[veth.left[0]],
                self.nodes[veth.right[0]],
                intfName1=veth.left[1],
                intfName2=veth.right[1],
            )
            for interface, (_, _, address) in ((link.intf1, veth.left), (link.intf2, veth.right)):
                interface.ip, interface.prefixLen = address.split("/")  # for Mininet's command line
        self._configure_addresses()
        self._configure_tcp()
        if self.plan.single_segments:
            self._no_super_packets()
        self._configure_mounts()
        self._shape()
        self._start_delay()
        pids = {name: node.pid for name, node in self.nodes.items()}
        describe(self.plan, pids, self.delay, self.session.folder)

    def _configure_addresses(self) -> None:
        batches: dict[str, list[str]] = {name: ["link set dev lo up"] for name in self.nodes}
        for veth in self.plan.veths:
            for name, interface, address in (veth.left, veth.right):
                batches[name] += [
                    f"link set dev {interface} mtu {self.topology.mtu} up",
                    f"address add {address} dev {interface}",
                ]
        control = self.topology.tcp.congestion_control
        for name, destination, via in self.plan.routes:
            suffix = f" congctl {control}" if name in self.plan.node_address else ""
            batches[name].append(f"route add {destination} via {via}{suffix}")
        for name, commands in batches.items():
            self.nodes[name].batch("ip", commands)
        if mtus := paths.mtu_commands(self.plan):
            core = self.nodes[CORE]
            core.batch("ip", mtus)
            routes = core.run(["ip", "-j", "route", "show", "table", "all"])
            paths.verify_mtus(self.plan, routes, core.run(["ip", "-j", "rule", "show"]))
        for router in [*self.plan.routers.values(), CORE]:
            if router in self.nodes:
                self.nodes[router].run(["sysctl", "-qw", "net.ipv4.ip_forward=1"])

    def _configure_tcp(self) -> None:
        tcp = self.topology.tcp
        buffer_bytes = round(tcp.buffer_mb * 1e6)
        wanted = {
            "net.ipv4.tcp_rmem": f"4096 131072 {buffer_bytes}",
            "net.ipv4.tcp_wmem": f"4096 16384 {buffer_bytes}",
            "net.ipv4.tcp_slow_start_after_idle": str(int(tcp.slow_start_after_idle)),
            "net.ipv4.tcp_no_metrics_save": "1",
        }
        for name in self.plan.node_address:
            node = self.nodes[name]
            node.run(["sysctl", "-qw", *(f"{key}={value}" for key, value in wanted.items())])
            got = node.run(["sysctl", "-n", *wanted]).splitlines()
            for key, value, line in zip(wanted, wanted.values(), got, strict=True):
                if line.split() != value.split():
                    raise TestbedError(f"{name}: {key} was set to {value!r} but reads {line!r}")
            routes = json.loads(node.run(["ip", "-j", "route", "show", "default"]))
            metrics = routes[0].get("metrics", [{}])[0] if routes else {}
            if metrics.get("congestion") != tcp.congestion_control:
                raise TestbedError(
                    f"{name}: congestion control {tcp.congestion_control} was asked for, the route has {metrics}"
                )
            self.tcp_settings[name] = {
                "congestion_control": metrics["congestion"],
                **{key: " ".join(line.split()) for key, line in zip(wanted, got, strict=True)},
            }

    def _no_super_packets(self) -> None:
        """A super-packet of up to 45 segments is lost as one, overflows a short queue, outlasts points of a slow trace."""
        for veth in self.plan.veths:
            for name, interface, _ in (veth.left, veth.right):
                node = self.nodes[name]
                node.run(["ethtool", "-K", interface, "tso", "off", "gso", "off", "gro", "off"])
                features = node.run(["ethtool", "-k", interface])
                if (
                    "tcp-segmentation-offload: on" in features
                    or "generic-segmentation-offload: on" in features
                ):
                    raise TestbedError(f"{name}: segmentation offload of {interface} cannot be turned off")

    def _configure_mounts(self) -> None:
        hosts = self.session.folder / "hosts"
        entries = ["127.0.0.1 localhost", *(f"{a} {name}" for name, a in self.plan.node_address.items())]
        hosts.write_text("\n".join(entries) + "\n", encoding="utf-8")
        empty = self.session.folder / "empty"
        empty.touch()
        for name in self.plan.node_address:
            self.nodes[name].make_private(hosts, empty, self.exposed, self.user)

    def _shape(self) -> None:
        for name, commands in lines.commands(self.plan, self.delay).items():
            self.nodes[name].batch("tc", commands)
        of_core = {}
        for link in self.plan.links:
            shown = self.nodes[link.owner].run(["tc", "class", "show", "dev", link.interface])
            rate.verify(link, shown)
            if link.owner == CORE:
                of_core[link.interface] = shown
        if of_core:
            paths.verify(self.plan, of_core, self.nodes[CORE].run(["tc", "-j", "qdisc", "show"]))

    def _start_delay(self) -> None:
        if self.delay == "netem":
            netem.verify(self.plan, self.nodes[CORE].run(["tc", "-j", "qdisc", "show"]))
        if self.delay != "nfqueue":
            return
        core = self.nodes[CORE]
        config = self.session.folder / "delayline-config.json"
        nfqueue.write_config(self.plan, config)
        log = (self.session.folder / "delayline.log").open("wb")
        self.delay_control = DelayControl()
        self.delay_line = core.start_root(
            ["chrt", "-f", "50", sys.executable, "-m", "testbed.shaping.delayline", str(config)]
            + [str(self.delay_stats_file)],
            stdin=self.delay_control.theirs,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=PROJECT,
        )
        log.close()
        self.delay_control.started()
        for rule in nfqueue.rules(self.plan, iptables_command()):
            core.run(rule)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self.delay_stats_file.exists():
            if self.delay_line.poll() is not None or time.monotonic() > deadline:
                said = (self.session.folder / "delayline.log").read_text(encoding="utf-8", errors="replace")
                last = (said.strip().splitlines() or ["it said nothing"])[-1]
                raise TestbedError(f"the delay line did not start: {last}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.delay_line.wait(0.01)

    def delay_stats(self, *, fresh: bool = False) -> dict[str, Any] | None:
        """The delay line's latest statistics; None where netem delays (the kernel keeps none).

        ``fresh`` waits for those that were written after the call, half a second at most.
        """
        if self.delay != "nfqueue":
            return None
        asked = time.monotonic()
        while True:
            data: dict[str, Any] = json.loads(self.delay_stats_file.read_text(encoding="utf-8"))
            if not fresh or data["written"] > asked:
                return data
            if not self.delay_alive() or time.monotonic() > asked + READY_TIMEOUT_S:
                raise NetworkBroke("the delay line gave no statistics: it died or hangs")
            time.sleep(0.02)

    def explain(self, failure: ProgramFailed) -> ProgramFailed:
        """The failure with its cause, where a node ran out of memory: that node failed first, whoever complained."""
        names = [failure.node, *(name for name in self.groups if name != failure.node)]
        for name in (name for name in names if name in self.groups):
            if said := self.groups[name].out_of_memory(name):
                log = Path(failure.log)
                return ProgramFailed(name, said, str(log.with_name(f"{name}{log.suffix}")))
        return failure

    def delay_alive(self) -> bool:
        """False once a delay line has died (its links are dark then)."""
        return self.delay_line is None or self.delay_line.poll() is None

    def contract(self, node: str, rank: int, world_size: int, run_dir: Path) -> dict[str, str]:
        """The ``env://`` variables of a program: what torchrun, torch.distributed and scripts expect."""
        master = next(iter(self.plan.node_address.values()))
        return {
            "MASTER_ADDR": master,
            "MASTER_PORT": str(CONTROL_PORT),
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": "0",
            "GLOO_SOCKET_IFNAME": NODE_INTERFACE,
            "TESTBED_NODE": node,
            "TESTBED_SITE": self.topology.nodes[node],
            "TESTBED_RUN_DIR": str(run_dir),
            "HOME": "/tmp",  # noqa: S108 - the node's private one
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        }
