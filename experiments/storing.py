"""What a run leaves behind: the Parquet files, the judgement, the record."""

from dataclasses import asdict
from typing import Any

import pandas as pd

from experiments import accounting, series
from experiments.evidence import Evidence
from experiments.happenings import event_record
from experiments.pace import broken_pace
from experiments.record import environment, write_json
from experiments.totals import totals
from testbed.suspicions import suspicions
from testbed.topology import Topology


def store(evidence: Evidence) -> dict[str, Any]:
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
