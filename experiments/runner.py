"""One run, from a resolved configuration to a folder of plain files.

Network up, links proved, one trainer per node, everything counted, network down, record written. A run whose
links are off, whose machine could not keep its promises, or whose byte counts disagree is stored as ``invalid``
with the reason; one whose trainer died as ``failed``; both keep what was measured.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.config import RunConfig, write_config
from experiments.errors import RequestError
from experiments.evidence import Clock, Evidence, Progress, silent
from experiments.happenings import TrainingProgress
from experiments.record import PROJECT
from experiments.storing import store
from experiments.watch import Watch
from testbed.capture import capturing, check_links
from testbed.counters import Counters
from testbed.doctor import require_root
from testbed.errors import NetworkBroke, ProgramFailed
from testbed.events.checks import shortest_delay_ms
from testbed.events.conductor import Conductor
from testbed.fidelity import MachineState, judge
from testbed.launch import Program, wait_for_all
from testbed.machine_lock import MachineLock
from testbed.network import Network
from testbed.nodes.namespace import User
from testbed.probe import probe
from testbed.programs import Programs
from testbed.sockets import SocketWatch
from testbed.topology import Topology

STALL_S = 30.0


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end a run as Ctrl-C does, once: a second signal must not break the taking down."""
    fired = False

    def handler(number: int, _frame: object) -> None:
        nonlocal fired
        if not fired:
            fired = True
            raise KeyboardInterrupt(signal.Signals(number).name)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {s: signal.signal(s, handler) for s in signals}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def run(
    config: RunConfig,
    run_dir: Path,
    progress: Progress = silent,
    *,
    resume: bool = False,
    pcap: Sequence[str] = (),
) -> dict[str, Any]:
    """Executes a run and returns its record; with ``resume`` it goes on from its newest whole checkpoint.

    ``pcap`` names links whose packets are captured meanwhile.

    Raises:
        RequestError: the folder holds something that is not a run of ours.
        TestbedError: the network could not be built (nothing was started).
        KeyboardInterrupt: after everything is taken down and what was measured is stored.
    """
    if isinstance(config.topology, Topology):
        require_root()
        check_links(config.topology, pcap)
    elif pcap:
        raise RequestError(f"--pcap: found {pcap[0]!r} with the topology loopback, allowed: an emulated one")
    run_dir = run_dir.resolve()  # the trainers run elsewhere
    with MachineLock() if isinstance(config.topology, Topology) else contextlib.nullcontext():
        _prepare(run_dir, resume=resume)
        return _execute(config, run_dir, progress, resume=resume, pcap=pcap)


def _execute(
    config: RunConfig, run_dir: Path, progress: Progress, *, resume: bool, pcap: Sequence[str]
) -> dict[str, Any]:
    """See `run`; the folder is there."""
    user = User.invoking() if os.geteuid() == 0 else User(os.getuid(), os.getgid())
    try:
        write_config(config, run_dir / "config.yaml")
        _make_folders(run_dir, user if isinstance(config.topology, Topology) else None)
        evidence = Evidence(config, run_dir, progress, resume, tuple(pcap))
        try:
            if isinstance(config.topology, Topology):
                _on_network(evidence, config.topology, user)
            else:
                _on_loopback(evidence)
        except ProgramFailed as failure:
            evidence.status = "failed"
            evidence.reasons.append(str(failure))
        except NetworkBroke as broken:
            evidence.status = "invalid"
            evidence.reasons.append(str(broken))
        except KeyboardInterrupt:
            evidence.status = "interrupted"
            evidence.reasons.append("interrupted")
            store(evidence)
            raise
        return store(evidence)
    finally:
        _give_back(run_dir)


def _prepare(run_dir: Path, *, resume: bool) -> None:
    """An empty folder; one that holds an earlier try of a run is emptied unless it goes on, any other is refused."""
    if run_dir.exists() and any(run_dir.iterdir()):
        if not (run_dir / "config.yaml").exists():
            raise RequestError(
                f"{run_dir}: found a folder that is not a run's, allowed is an empty or a new one"
            )
        if resume:
            for summary in (run_dir / "ranks").glob("rank-*.summary.json"):
                summary.unlink()  # it would speak for a rank that has not finished again
        else:
            shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)


def _make_folders(run_dir: Path, user: User | None) -> None:
    """What the trainers write into is theirs where they run as another ``user``."""
    for name in ("ranks", "checkpoints", "weights", "logs"):
        (run_dir / name).mkdir(exist_ok=True)
        if user is None or os.geteuid() != 0 or name == "logs":
            continue
        for path in [run_dir / name, *(run_dir / name).rglob("*")]:
            os.chown(path, user.uid, user.gid)


def _give_back(run_dir: Path) -> None:
    """Files belong to whoever invoked us, not to root nor to the trainers' user."""
    if os.geteuid() != 0:
        return
    uid, gid = int(os.environ.get("SUDO_UID", "0")), int(os.environ.get("SUDO_GID", "0"))
    for path in [run_dir, *run_dir.rglob("*")]:
        os.chown(path, uid, gid, follow_symlinks=False)
    parent = run_dir.parent
    if uid and parent.stat().st_uid == 0 and parent.is_relative_to(Path.cwd()):
        os.chown(parent, uid, gid)


def _trainer_command(evidence: Evidence) -> list[str]:
    command = [sys.executable, "-m", "trainer", str(evidence.run_dir / "config.yaml")]
    return [*command, "--resume"] if evidence.resume else command


def _stall_limit_s(config: RunConfig) -> float:
    step_s = getattr(config.compute, "step_s", 0.0) * max(getattr(config.compute, "pace", ()) or (1.0,))
    return max(STALL_S, 2 * step_s + 10)


def _on_network(evidence: Evidence, topology: Topology, user: User) -> None:
    clock = Clock(evidence.seconds)
    progress = evidence.progress
    progress("up", {"topology": topology.name})
    with interruptible(), contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(topology, expose=_exposed(evidence), user=user))
        counters = stack.enter_context(Counters(network))
        evidence.network, evidence.delay = network, network.delay
        clock.lap("up")
        progress("probe", {"pairs": len(network.plan.delays)})
        evidence.before = probe(network)
        clock.lap("probe_before")
        if evidence.before.problems:
            evidence.status = "invalid"
            evidence.reasons += [f"before the run: {p}" for p in evidence.before.problems]
            return
        machine = MachineState.now(network.delay_stats(fresh=True))
        with (
            capturing(network, evidence.pcap, evidence.run_dir) as evidence.captures,
            SocketWatch(network, evidence.run_dir / "sockets") as sockets,
        ):
            evidence.first = counters.read()
            _train(evidence, network, counters)
            evidence.flows = sockets.flows()
        evidence.last = counters.read()
        clock.lap("train")
        evidence.fidelity = judge(
            before=machine,
            after=MachineState.now(network.delay_stats(fresh=network.delay_alive())),
            delay_alive=network.delay_alive(),
            shortest_delay_ms=shortest_delay_ms(network.plan.delays, topology.events),
            direct_packets={name: reading.direct_packets for name, reading in evidence.last.items()},
            dropped_packets=sum(r.dropped - evidence.first[n].dropped for n, r in evidence.last.items()),
            backlog_max_bytes=max((reading.backlog for reading in evidence.samples), default=0),
        )
        evidence.reasons += evidence.fidelity.problems + (
            evidence.events.problems() if evidence.events else []
        )
        if network.delay_alive():
            progress("probe", {"pairs": len(network.plan.delays)})
            evidence.after = probe(network)
            evidence.reasons += [f"after the run: {p}" for p in evidence.after.problems]
        clock.lap("probe_after")
    clock.lap("down")
    if evidence.reasons:
        evidence.status = "invalid"


def _exposed(evidence: Evidence) -> list[Path]:
    """Folders that the trainers must reach at their own paths."""
    folders = [evidence.run_dir]
    for source in (Path(evidence.config.data.source), Path(evidence.config.model.init_from or "")):
        if source.name and source.exists():
            folders.append(source.resolve() if source.is_dir() else source.resolve().parent)
    return folders


def _train(evidence: Evidence, network: Network, counters: Counters) -> None:
    config, run_dir = evidence.config, evidence.run_dir
    placement = config.placement()
    evidence.launched, evidence.launched_epoch = time.monotonic(), time.time()

    def start(node: str) -> Program:
        rank, log = placement.index(node), run_dir / "logs" / f"{node}.log"
        with log.open("ab") as output:  # a resumed run and a node that is started again go on in theirs
            process = network.nodes[node].start_program(
                _trainer_command(evidence),
                network.user,
                network.contract(node, rank, len(placement), run_dir),
                output,
                PROJECT,
            )
        return Program(node, process, log)

    reading = TrainingProgress(run_dir)
    programs = [start(node) for node in placement]
    watch = Watch(evidence, counters)
    events = network.topology.events
    running = Programs(programs, start)
    try:
        with Conductor(network, events, running, began=reading.began, progress=reading.read) as conductor:
            evidence.events = conductor
            wait_for_all(
                programs,
                stall_s=_stall_limit_s(config),
                sent_bytes=watch.sent_bytes,
                on_poll=watch.poll,
                disturbed=conductor.disturbed,
                patient=conductor.will_pass,
            )
    except ProgramFailed as failure:
        raise network.explain(failure) from failure
    finally:
        evidence.nodes = {name: group.row() for name, group in network.groups.items()}
    evidence.killed = [p.node for p in programs if p.ended_by]


def _on_loopback(evidence: Evidence) -> None:
    """All ranks as processes on 127.0.0.1, without root and without a testbed."""
    config, run_dir = evidence.config, evidence.run_dir
    clock = Clock(evidence.seconds)
    port = _free_port()
    programs = []
    evidence.launched, evidence.launched_epoch = time.monotonic(), time.time()
    with interruptible():
        try:
            for rank in range(config.world_size):
                log = run_dir / "logs" / f"rank-{rank}.log"
                contract = {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(config.world_size),
                    "LOCAL_RANK": str(rank),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "TESTBED_RUN_DIR": str(run_dir),
                }
                with log.open("ab" if evidence.resume else "wb") as output:
                    process = subprocess.Popen(
                        _trainer_command(evidence),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **contract},
                        cwd=PROJECT,
                        text=True,
                        start_new_session=True,
                    )
                programs.append(Program(f"rank-{rank}", process, log))
            watch = Watch(evidence)
            wait_for_all(programs, stall_s=_stall_limit_s(config), on_poll=watch.poll)
        finally:
            for program in programs:
                program.process.kill()
            for program in programs:
                program.process.wait()
    clock.lap("train")


def _free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return int(probe_socket.getsockname()[1])
