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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from experiments import accounting, series
from experiments.config import RunConfig, write_config
from experiments.errors import RequestError
from experiments.happenings import TrainingProgress, event_record
from experiments.pace import broken_pace
from experiments.record import PROJECT, environment, write_json
from experiments.totals import totals
from testbed.capture import Capture, capturing, check_links
from testbed.counters import Counters, Reading
from testbed.doctor import require_root
from testbed.errors import NetworkBroke, ProgramFailed
from testbed.events.checks import shortest_delay_ms
from testbed.events.conductor import Conductor
from testbed.fidelity import Fidelity, MachineState, judge
from testbed.launch import Program, wait_for_all
from testbed.machine_lock import MachineLock
from testbed.network import Network
from testbed.nodes.namespace import User
from testbed.probe import Probe, probe
from testbed.programs import Programs
from testbed.sockets import Flow, SocketWatch
from testbed.suspicions import suspicions
from testbed.topology import Topology

SAMPLE_EVERY_S = 0.5
STALL_S = 30.0

Progress = Callable[[str, dict[str, Any]], None]
"""Called with what is going on (``up``, ``probe``, ``train``, ...) and facts about it."""


def _silent(_what: str, _facts: dict[str, Any]) -> None:
    pass


@dataclass
class Evidence:
    """One run's request, and what it leaves behind beside the trainer's own files."""

    config: RunConfig
    run_dir: Path
    progress: Progress
    resume: bool = False
    pcap: tuple[str, ...] = ()

    status: str = "done"
    reasons: list[str] = field(default_factory=list)
    delay: str | None = None
    before: Probe | None = None
    after: Probe | None = None
    fidelity: Fidelity | None = None
    nodes: dict[str, Any] = field(default_factory=dict)  # limits, throttling and memory of limited nodes
    captures: list[Capture] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    first: dict[str, Reading] = field(default_factory=dict)
    last: dict[str, Reading] = field(default_factory=dict)
    samples: list[Reading] = field(default_factory=list)
    launched: float = 0.0  # monotonic
    launched_epoch: float = 0.0
    network: Network | None = None
    events: Conductor | None = None
    killed: list[str] = field(default_factory=list)
    """Nodes that an event killed and none started again."""
    seconds: dict[str, float] = field(default_factory=dict)


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
    progress: Progress = _silent,
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
            _store(evidence)
            raise
        return _store(evidence)
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
    clock = _Clock(evidence.seconds)
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
    watch = _Watch(evidence, counters)
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


class _Watch:
    """Samples the links twice a second and reports how far the training is."""

    def __init__(self, evidence: Evidence, counters: Counters | None = None) -> None:
        last_stage = evidence.config.parallel.stages - 1
        self._file = evidence.run_dir / "ranks" / f"rank-{last_stage}.steps.jsonl"
        self._evidence, self._counters = evidence, counters
        self._due = 0.0
        self._told = 0
        self._traces: set[tuple[int, int]] = set()  # of a trace only the first change is told

    def sent_bytes(self) -> dict[str, int]:
        """Node -> bytes out of it, from the latest sample."""
        latest = self._evidence.samples[-64:]
        return {reading.link: reading.tx_bytes for reading in latest}

    def poll(self) -> None:
        """To be called often; does something every half second."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + SAMPLE_EVERY_S
        self._tell_events()
        network = self._evidence.network
        if network is not None and not network.delay_alive():
            raise NetworkBroke("the delay line died during the run: its links went dark")
        if self._counters:
            self._evidence.samples += self._counters.read().values()
        step = series.last_line(self._file)
        facts = {"steps": self._evidence.config.train.steps, "elapsed_s": now - self._evidence.launched}
        self._evidence.progress("train", {**facts, **(step or {})})

    def _tell_events(self) -> None:
        happened = self._evidence.events.happened if self._evidence.events else []
        for one in happened[self._told :]:
            if not (one.do == "trace" and (one.event, one.turn) in self._traces):
                self._evidence.progress("event", {"text": str(one), **one.row(self._evidence.launched)})
            self._traces.add((one.event, one.turn))
        self._told = len(happened)


def _on_loopback(evidence: Evidence) -> None:
    """All ranks as processes on 127.0.0.1, without root and without a testbed."""
    config, run_dir = evidence.config, evidence.run_dir
    clock = _Clock(evidence.seconds)
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
            watch = _Watch(evidence)
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


class _Clock:
    """Names what the seconds of a run went into."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """Gives the time since the last lap to ``name``."""
        now = time.monotonic()
        self._seconds[name] = now - self._last
        self._last = now


def _store(evidence: Evidence) -> dict[str, Any]:
    """Writes the Parquet files and the record."""
    config, run_dir = evidence.config, evidence.run_dir
    frames = series.collect(run_dir)
    if evidence.samples:
        rows = [reading.row(evidence.launched) for reading in evidence.samples]
        series.write_parquet(pd.DataFrame(rows), run_dir / "links.parquet")
    if evidence.events and evidence.events.happened:
        rows = [one.row(evidence.launched) for one in evidence.events.happened]
        series.write_parquet(pd.DataFrame(rows), run_dir / "events.parquet")
    ranks = series.summaries(run_dir)
    emulated = isinstance(config.topology, Topology)
    counts = _account(evidence, ranks)
    if evidence.status == "done" and len(ranks) + len(evidence.killed) < config.world_size:
        evidence.status = "failed"
        evidence.reasons.append(f"{len(ranks)} of {config.world_size} ranks wrote a summary")
    if evidence.status in ("done", "invalid"):
        # without a network nothing is said about time, so a missed pace falsifies nothing there
        # and what a killed node had sent is in nobody's summary, so the counts cannot agree
        judged = counts.problems if counts and not evidence.killed else []
        events = config.topology.events if isinstance(config.topology, Topology) else ()
        stopped = any(event.do in ("freeze", "kill", "restart") for event in events)
        problems = judged + (broken_pace(ranks, frames["steps"], stopped=stopped) if emulated else [])
        if isinstance(config.topology, Topology):
            problems += accounting.congestion_problems(config.topology.tcp.congestion_control, ranks)
        problems += [rank["incomplete"] for rank in ranks[:1] if rank.get("incomplete")]
        evidence.reasons += problems
        if problems:
            evidence.status = "invalid"
    record = {
        **environment(),
        "run_id": run_dir.name,
        "name": config.name,
        "status": evidence.status,
        "valid": evidence.status == "done",
        "reason": "; ".join(evidence.reasons),
        "evidence": "trained" if emulated else "counted",
        "seed": config.seed,
        "started_epoch": evidence.launched_epoch,
        "seconds": {name: round(value, 3) for name, value in evidence.seconds.items()},
        "topology": config.topology.model_dump(mode="json")
        if isinstance(config.topology, Topology)
        else None,
        "links": {
            "delay": evidence.delay,
            "suspicious": suspicions(config.topology) if isinstance(config.topology, Topology) else [],
            "wanted": [asdict(link) for link in evidence.network.plan.links] if evidence.network else [],
            "paths": [asdict(path) for path in evidence.network.plan.delays] if evidence.network else [],
            "tcp": evidence.network.tcp_settings if evidence.network else {},
            "measured": _measured(evidence),
            "measured_links": _measured_links(evidence),
        },
        "captures": [capture.row() for capture in evidence.captures],
        "events": event_record(evidence.events, evidence.launched),
        "fidelity": _fidelity(evidence),
        "accounting": counts.row() if counts else None,
        "data": ranks[0].get("data") if ranks else None,
        "totals": totals(config, frames, ranks, counts, evidence.launched_epoch),
        "ranks": ranks,
    }
    if evidence.network:
        record["totals"]["wan_links"] = list(evidence.network.plan.uplinks.values())
    write_json(run_dir / "record.json", record)
    return record


def _fidelity(evidence: Evidence) -> dict[str, Any] | None:
    """What was watched, and of every node with limits what they did, also where the run failed."""
    if evidence.fidelity is None and not evidence.nodes:
        return None
    return {**(evidence.fidelity.row() if evidence.fidelity else {}), "nodes": evidence.nodes}


def _measured(evidence: Evidence) -> list[dict[str, Any]]:
    return [
        {"when": when, **pair.row()}
        for when, measured in (("before", evidence.before), ("after", evidence.after))
        for pair in (measured.measured if measured else ())
    ]


def _measured_links(evidence: Evidence) -> list[dict[str, Any]]:
    return [
        {"when": when, **link.row()}
        for when, measured in (("before", evidence.before), ("after", evidence.after))
        for link in (measured.links if measured else ())
    ]


def _account(evidence: Evidence, ranks: list[dict[str, Any]]) -> accounting.Accounting | None:
    """Reconciles the three byte counts. Exchanges between replicas of one site are LAN traffic."""
    if not ranks:
        return None
    topology = evidence.config.topology
    one_site = isinstance(topology, Topology) and len(topology.sites) == 1
    earlier = _payload(ranks, "carried_payload_bytes", one_site=one_site)
    whole = _payload(ranks, "payload_bytes", one_site=one_site)
    payload = (whole[0] - earlier[0], whole[1] - earlier[1], whole[2] - earlier[2])
    network = evidence.network
    if network is None or not evidence.last:
        return accounting.with_earlier(accounting.reconcile(payload, None, None), earlier)
    kernel = accounting.kernel_bytes(network.plan, evidence.flows)
    wire = accounting.wire_bytes(network.plan, evidence.first, evidence.last)
    framing = 0 if one_site else sum(int(rank.get("wan_framing_bytes", 0)) for rank in ranks)
    return accounting.with_earlier(accounting.reconcile(payload, kernel, wire, framing), earlier)


def _payload(ranks: list[dict[str, Any]], key: str, *, one_site: bool) -> tuple[int, int, int]:
    """(WAN, LAN, evaluation) bytes that all ranks together count under ``key``."""
    exchanged, pipeline, evaluation = (
        sum(int(rank.get(key, {}).get(kind, 0)) for rank in ranks) for kind in ("wan", "lan", "evaluation")
    )
    return (0, exchanged + pipeline, evaluation) if one_site else (exchanged, pipeline, evaluation)
