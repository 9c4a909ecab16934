"""The figures of a whole run, computed from what the ranks summed up and from the byte accounts."""

from typing import Any

import pandas as pd

from experiments.accounting import Accounting
from experiments.columns import TIMES
from experiments.config import RunConfig


def compressor_name(config: RunConfig) -> str:
    """What travels: the compressor's name, or the wire's precision for methods without one."""
    compressor = getattr(config.method, "compressor", None)
    if compressor is not None:
        return str(compressor.name)
    return str(getattr(config.method, "wire", "none"))


def _mean(ranks: list[dict[str, Any]], bucket: str) -> float | None:
    values = [float(rank[bucket]) for rank in ranks if rank.get(bucket) is not None]
    return sum(values) / len(values) if values else None


def totals(
    config: RunConfig,
    frames: dict[str, pd.DataFrame],
    ranks: list[dict[str, Any]],
    counts: Accounting | None,
    launched_epoch: float,
) -> dict[str, Any]:
    """The ``totals`` of a record; what was not measured is None.

    Times are means over ranks in seconds: every rank lives through the same wall time, in different buckets.
    """
    result: dict[str, Any] = {
        "method": config.method.name,
        "replicas": config.parallel.replicas,
        "stages": config.parallel.stages,
        "local_steps": getattr(config.method, "local_steps", 1),
        "compressor": compressor_name(config),
        "params": ranks[0]["params_total"] if ranks else None,
    }
    steps = frames["steps"]
    done = steps.groupby("rank").step.max().min() if not steps.empty else 0
    rounds = frames["rounds"]
    if not rounds.empty:
        own = rounds[rounds["rank"] == 0].sort_values("round").local_steps
        result["rounds"] = len(own)
        # the last round is as long as the steps that were left
        result["mean_local_steps"] = float((own.iloc[:-1] if len(own) > 1 else own).mean())
    result["steps"] = int(done)
    result["tokens"] = int(done) * config.tokens_per_step
    if not ranks:
        return result
    result["tokens"] = int(ranks[0]["tokens"])
    last_stage = [rank for rank in ranks if rank.get("final_loss") is not None]
    losses = [float(rank["final_loss"]) * config.weight(rank["replica"]) for rank in last_stage]
    result["final_loss"] = sum(losses) / len(losses) if losses else None  # by tokens
    scored = next((rank for rank in ranks if rank.get("val_loss") is not None), {})
    result["val_loss"], result["val_bpb"] = scored.get("val_loss"), scored.get("val_bpb")
    wall_s = max(float(rank["wall_s"]) for rank in ranks)
    result["wall_s"] = wall_s
    result["tokens_per_s"] = result["tokens"] / wall_s if wall_s else None
    for bucket in TIMES:
        result[bucket] = _mean(ranks, bucket)
    result["utilisation"] = result["compute_s"] / wall_s if wall_s and result["compute_s"] else None
    began = min((float(rank["began_epoch"]) for rank in ranks if "began_epoch" in rank), default=None)
    result["train_began_t"] = began - launched_epoch if began is not None else None
    if counts is not None:
        wan, lan = counts.wan_payload_bytes, counts.lan_payload_bytes
        result |= {"payload_bytes": wan + lan, "wan_payload_bytes": wan, "lan_payload_bytes": lan}
        result |= {"wan_wire_bytes": counts.wan_wire_bytes, "lan_wire_bytes": counts.lan_wire_bytes}
        result["control_bytes"] = counts.control_wire_bytes
        wire = counts.wan_wire_bytes
        result["wan_bytes_per_token"] = (
            wire / result["tokens"] if wire is not None and result["tokens"] else None
        )
    return result
