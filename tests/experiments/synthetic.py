"""A finished sweep's folder as the runner leaves it, with believable figures: 160 steps of a 1M-parameter model."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

STEPS, EVERY, TOKENS_PER_STEP, PARAMS = 160, 16, 2048, 1_070_000
MODEL = {"preset": "decoder-1m"}
METHODS = {
    "allreduce": {"name": "allreduce", "wire": "fp32", "collective": "tuned"},
    "diloco": {"name": "diloco", "local_steps": 16, "compressor": {"name": "none", "error_feedback": False}},
    "dilocox": {
        "name": "dilocox",
        "local_steps": 16,
        "overlap": {"delay_rounds": 1, "progress": "keep"},
        "compressor": {"name": "lowrank-int4", "rank": 32, "adaptive": True},
    },
}
_SHAPE = {
    "allreduce": (1.95, 0.095),
    "diloco": (2.08, 0.012),
    "dilocox": (2.16, 0.003),
}  # final loss, exposed share
_PAYLOAD = {
    "allreduce": 4 * PARAMS,
    "diloco": 4 * PARAMS,
    "dilocox": 0.11 * PARAMS,
}  # per replica and exchange


def write_sweep(
    folder: Path, methods=("allreduce", "diloco", "dilocox"), seeds=(0,), baseline=None, changes=None
) -> Path:
    """Writes one run per method and seed and a sweep.yaml; `changes` maps a run id to keys of its record."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"name": folder.name, "baseline": baseline or {"method.name": "allreduce"}}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    for method in methods:
        for seed in seeds:
            write_run(folder, method, seed, (changes or {}).get(f"{method}-s{seed}", {}))
    return folder


def write_run(folder: Path, method: str, seed: int = 0, change=None, **method_keys) -> Path:
    suffix = "".join(f"-{value}" for value in method_keys.values())
    run = folder / f"{method}{suffix}-s{seed}"
    run.mkdir(parents=True)
    section = {**METHODS[method], **method_keys}
    config = {
        "name": folder.name,
        "seed": seed,
        "model": MODEL,
        "data": {"source": "pydoc-topics", "tokenizer": "bytes", "seq_len": 128},
        "parallel": {"replicas": 2, "stages": 2, "microbatches": 4, "schedule": "1f1b"},
        "train": {"steps": STEPS, "batch_size": 8, "lr": 0.001},
        "method": section,
        "compute": {"mode": "paced", "step_s": 0.35},
        "topology": {"name": "two-sites-1gbps"},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    steps, evals, rounds, links, wire = _series(method, seed, section.get("local_steps", 1))
    for kind, frame in (("steps", steps), ("evals", evals), ("rounds", rounds), ("links", links)):
        frame.to_parquet(run / f"{kind}.parquet", index=False)
    record = _record(run.name, method, seed, section, steps, evals, wire)
    record.update(change or {})
    (run / "record.json").write_text(json.dumps(record), encoding="utf-8")
    return run


def _series(method: str, seed: int, h: int):
    rng = np.random.default_rng(seed + 10 * len(method))
    final, exposed = _SHAPE[method]
    step_s = 0.35 / (1 - exposed) + 0.002
    exchanges = np.arange(1, STEPS + 1) % h == 0
    per_rank = _PAYLOAD[method] / 2  # a stage's half of the model

    def loss(step):
        return final + (5.55 - final) * math.exp(-step / 28) + 0.05 * math.exp(-step / 200)

    rows = []
    for rank in range(4):
        for step in range(1, STEPS + 1):
            wait = exposed * step_s * (h if exchanges[step - 1] else 0)
            rows.append(
                {
                    "rank": rank,
                    "step": step,
                    "tokens": step * TOKENS_PER_STEP,
                    "t": step * step_s,
                    "loss": loss(step) + rng.normal(0, 0.05) if rank % 2 else None,
                    "lr": 1e-3,
                    "compute_s": 0.27,
                    "bubble_s": 0.07,
                    "compress_s": 0.02 if method == "dilocox" and exchanges[step - 1] else 0.0,
                    "exposed_comm_s": wait,
                    "other_s": 0.008,
                    "payload_bytes": int(per_rank) if exchanges[step - 1] else 0,
                    "lan_payload_bytes": 2_359_296,
                }
            )
    steps = pd.DataFrame(rows)
    at = np.arange(0, STEPS + 1, EVERY)
    values = np.array([loss(step) for step in at]) + rng.normal(0, 0.012, len(at))
    evals = pd.DataFrame(
        {
            "step": at,
            "tokens": at * TOKENS_PER_STEP,
            "t": at * step_s,
            "val_loss": values,
            "val_bpb": values / math.log(2),
        }
    )
    ends = np.arange(h, STEPS + 1, h)
    rounds = pd.DataFrame(
        {
            "rank": 0,
            "round": np.arange(len(ends)),
            "local_steps": h,
            "rank_r": 32,
            "payload_bytes": int(per_rank),
            "step": ends,
        }
    )
    clock = np.arange(0, STEPS * step_s + 8, 0.5)
    done = np.clip((clock - 3) / step_s, 0, STEPS)
    sent = np.floor(done / h) * 2 * per_rank * 1.055
    links = pd.concat(
        pd.DataFrame(
            {
                "t": clock,
                "link": name,
                "tx_bytes": (sent if name.endswith("/up") else 3 * sent).astype(int),
                "tx_packets": (sent / 1500).astype(int),
                "dropped": 0,
                "backlog": 0,
            }
        )
        for name in ("north/up", "south/up", "north-0")
    )
    return steps, evals, rounds, links, int(2 * sent[-1])


def _record(run_id, method, seed, section, steps, evals, wire):
    payload = int(steps["payload_bytes"].sum())
    lan = int(steps["lan_payload_bytes"].sum())
    wall = float(steps["t"].max())
    mean = (
        steps.groupby("rank")[["compute_s", "bubble_s", "compress_s", "exposed_comm_s", "other_s"]]
        .sum()
        .mean()
    )
    tokens = STEPS * TOKENS_PER_STEP
    return {
        "schema_version": 1,
        "run_id": run_id,
        "name": "quickstart",
        "status": "done",
        "valid": True,
        "reason": "",
        "evidence": "trained",
        "seed": seed,
        "versions": {"python": "3.11.2", "torch": "2.13.0+cpu"},
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "dirty": False,
        "kernel": "6.1.0-18-amd64",
        "machine": {"cpu": "AMD EPYC 7B13", "cores": 2, "memory_gib": 7.8},
        "topology": {"name": "two-sites-1gbps"},
        "links": {
            "delay": "nfqueue",
            "wanted": [
                {"name": "north/up", "owner": "north-r", "rate_mbps": 1000.0, "queue_bytes": 3_750_000},
                {"name": "south/up", "owner": "south-r", "rate_mbps": 1000.0, "queue_bytes": 3_750_000},
            ],
            "measured": [
                {
                    "when": when,
                    "source": a,
                    "target": b,
                    "rtt_wanted_ms": 30.0,
                    "rtt_ms": 30.21,
                    "rate_wanted_mbps": 1000.0,
                    "goodput_wanted_mbps": 956.6,
                    "goodput_mbps": 953.2,
                    "ok": True,
                }
                for when in ("before", "after")
                for a, b in (("north", "south"), ("south", "north"))
            ],
        },
        "fidelity": {"cpu_busy_share": 0.81, "steal_share": 0.0, "lateness_p99_ms": 0.12, "problems": []},
        "accounting": {
            "wan_payload_bytes": payload,
            "lan_payload_bytes": lan,
            "kernel_wan_bytes": int(payload * 1.0004),
            "wan_wire_bytes": wire,
            "wan_overhead": wire / payload,
            "kernel_deviation": 0.0004,
            "problems": [],
        },
        "data": {"source": "pydoc-topics", "sha256": "ab" * 32},
        "totals": {
            "method": method,
            "replicas": 2,
            "stages": 2,
            "params": PARAMS,
            "local_steps": section.get("local_steps", 1),
            "compressor": section.get("compressor", {}).get("name", section.get("wire", "none")),
            "tokens": tokens,
            "steps": STEPS,
            "final_loss": float(evals["val_loss"].iloc[-1]) + 0.02,
            "val_loss": float(evals["val_loss"].iloc[-1]),
            "val_bpb": float(evals["val_bpb"].iloc[-1]),
            "wall_s": wall,
            "tokens_per_s": tokens / wall,
            **mean.to_dict(),
            "utilisation": float(mean["compute_s"]) / wall,
            "payload_bytes": payload + lan,
            "wan_payload_bytes": payload,
            "lan_payload_bytes": lan,
            "wan_wire_bytes": wire,
            "lan_wire_bytes": int(lan * 1.05),
            "control_bytes": 120_000,
            "wan_bytes_per_token": wire / tokens,
            "train_began_t": 3.0,
            "wan_links": ["north/up", "south/up"],
        },
    }
