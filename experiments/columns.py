"""Names of columns: what scripts and notebooks may rely on."""

import pandas as pd

SERIES = {
    "steps": (
        *("rank", "step", "tokens", "t", "loss", "lr", "compute_s", "bubble_s", "compress_s"),
        *("exposed_comm_s", "other_s", "payload_bytes", "lan_payload_bytes"),
    ),
    "rounds": (
        *("rank", "round", "local_steps", "rank_r", "effective_rank", "compress_s", "comm_s"),
        *("exposed_comm_s", "payload_bytes", "planned_bytes", "relative_error", "delta_norm", "outer_lr"),
        *("step", "outer_hash"),
    ),
    "evals": ("step", "tokens", "t", "val_loss", "val_bpb"),
    "links": ("t", "link", "tx_bytes", "tx_packets", "dropped", "backlog"),
}
"""Columns of a run's Parquet files; a file may have more. Times in s, losses in nats per token."""

TIMES = ("compute_s", "bubble_s", "compress_s", "exposed_comm_s", "checkpoint_s", "other_s")
"""Where the wall time of a run went, in s, mean over ranks: they add up to `wall_s`."""

TOTALS = (
    *("params", "tokens", "steps", "final_loss", "val_loss", "val_bpb", "wall_s", "tokens_per_s", *TIMES),
    *("utilisation", "payload_bytes", "wan_payload_bytes", "lan_payload_bytes", "wan_wire_bytes"),
    *("lan_wire_bytes", "control_bytes", "wan_bytes_per_token", "mean_local_steps"),
)
"""Summary columns that come from the `totals` of a record."""

RATIOS = ("volume_reduction", "speedup", "speedup_to_loss", "loss_gap")
"""Summary columns relative to the run named in `baseline`: x times, and nats per token for `loss_gap`."""

SUMMARY = (
    *("run_id", "method", "status", "valid", "reason", "seed", "replicas", "stages", "params", "local_steps"),
    *("compressor", *TOTALS[1:], *RATIOS, "baseline", "evidence"),
)
"""Columns of summary.parquet, which after them has every configuration key that varied."""


def varied_columns(runs: pd.DataFrame) -> list[str]:
    """The columns of a summary that are configuration keys."""
    return [column for column in runs.columns if column not in SUMMARY]
