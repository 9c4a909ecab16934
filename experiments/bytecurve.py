"""How many bytes had crossed the WAN by the time of each evaluation."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd


def with_wan_bytes(
    evals: pd.DataFrame, steps: pd.DataFrame, links: pd.DataFrame, totals: Mapping[str, Any]
) -> pd.DataFrame:
    """One run's `evals` with `wan_payload_bytes` and `wan_wire_bytes`, both cumulative since training began.

    Payload is what the steps handed to the transport. Wire bytes are kept where the file has them. Else the
    kernel's total for the run is spread over its steps as the payload was: exact to a step, and free of the
    clock that evaluations stop. Where steps carry no payload, the uplinks' counters are read at the
    evaluation's time. NaN where nothing is known.

    Args:
        evals: columns step, t (s since training began, evaluation excluded).
        steps: columns step, payload_bytes (per rank and step, WAN only).
        links: columns t (s since launch), link, tx_bytes (cumulative).
        totals: of the record: wan_wire_bytes, wan_links, train_began_t (s since launch).
    """
    payload = _payload_until(evals, steps)
    evals = evals.assign(wan_payload_bytes=math.nan if payload is None else payload)
    if "wan_wire_bytes" in evals.columns and evals["wan_wire_bytes"].notna().any():
        return evals
    total = totals.get("wan_wire_bytes")
    if total is not None and payload is not None:
        return evals.assign(wan_wire_bytes=payload / float(steps["payload_bytes"].sum()) * float(total))
    counted = _from_counters(evals, links, totals)
    return evals.assign(wan_wire_bytes=math.nan if counted is None else counted)


def _payload_until(evals: pd.DataFrame, steps: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    by_step = steps.groupby("step")["payload_bytes"].sum().sort_index().cumsum()
    if by_step.empty or not by_step.iloc[-1] > 0:
        return None
    at = np.searchsorted(by_step.index.to_numpy(float), evals["step"].to_numpy(float), side="right")
    return np.asarray(np.concatenate([[0.0], by_step.to_numpy(float)])[at], dtype=np.float64)


def _from_counters(
    evals: pd.DataFrame, links: pd.DataFrame, totals: Mapping[str, Any]
) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    uplinks = [name for name in totals.get("wan_links") or [] if name in set(links["link"])]
    if not uplinks:
        return None
    began = float(totals.get("train_began_t") or 0.0)
    times = evals["t"].to_numpy(float) + began
    sent = np.zeros(len(times))
    for name in uplinks:
        link = links[links["link"] == name].sort_values("t")
        counter, clock = link["tx_bytes"].to_numpy(float), link["t"].to_numpy(float)
        sent += np.interp(times, clock, counter) - np.interp(began, clock, counter)
    return sent
