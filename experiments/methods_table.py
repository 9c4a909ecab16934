"""Every method in one line: what it does, where it is from, what it sends."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError
from rich.table import Table

from experiments.errors import RequestError
from trainer.config import TrainerConfig
from trainer.config_errors import config_error_sentence
from trainer.methods import METHODS
from trainer.presets import FOLDER, preset

WIDE = 160
"""Columns of a terminal from which on the table says what each method does."""


def method_names() -> list[str]:
    """All methods that have a preset, in the order in which the trainer lists them."""
    names = [str(get_args(config.model_fields["name"].annotation)[0]) for config in METHODS]
    return [name for name in names if (FOLDER / f"{name}.yaml").is_file()]


def method_rows(model: str, replicas: int, stages: int) -> list[dict[str, Any]]:
    """One row for each method with its preset's settings.

    Keys: name, source, does, every_steps, exchange_bytes and bytes_per_step (mean over replicas, what one
    sends to the others), reduction (AllReduce's fp32 bytes per step over the method's).

    Raises:
        RequestError: no such model, or one that does not have so many stages.
    """
    from trainer.planning import planned_traffic  # noqa: PLC0415 - imports torch

    rows = []
    for name in method_names():
        about = preset(name)
        traffic = planned_traffic(_config(name, model, replicas, stages))
        rows.append(
            {
                "name": name,
                "source": about["source"],
                "does": about["does"],
                "every_steps": traffic.every_steps,
                "exchange_bytes": traffic.exchange_bytes,
                "bytes_per_step": traffic.bytes_per_step,
            }
        )
    dense = next(row["bytes_per_step"] for row in rows if row["name"] == "allreduce")
    for row in rows:
        own = row["bytes_per_step"]
        row["reduction"] = dense / own if own else None
    return rows


def table(rows: Sequence[Mapping[str, Any]], width: int) -> Table:
    """The rows for a terminal, what each method does only where there is room."""
    heads = ("method", "source", "every", "kB then", "kB a step", "fewer")
    wide = width >= WIDE
    shown = Table(*heads, *(("does",) if wide else ()), box=None, padding=(0, 2, 0, 0))
    for number, column in enumerate(shown.columns):
        column.no_wrap = True
        column.justify = "right" if 2 <= number <= 5 else "left"
    for row in rows:
        reduction = row["reduction"]
        shown.add_row(
            row["name"],
            row["source"],
            str(row["every_steps"]),
            f"{row['exchange_bytes'] / 1e3:.1f}",
            f"{row['bytes_per_step'] / 1e3:.2f}",
            "-" if reduction is None else f"{reduction:.0f}x",
            *((row["does"],) if wide else ()),
        )
    return shown


def _config(name: str, model: str, replicas: int, stages: int) -> TrainerConfig:
    written: dict[str, Any] = {
        "model": {"preset": model},
        "parallel": {"replicas": replicas, "stages": stages, "microbatches": max(4, stages)},
        "train": {"batch_size": max(4, stages), "inner": "sgd" if name == "demo" else "adamw"},
        "method": {"name": name},
    }
    try:
        return TrainerConfig.model_validate(written)
    except ValidationError as error:
        raise RequestError(config_error_sentence(error, "methods", TrainerConfig)) from error


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as the table of docs/methods.md."""
    lines = [
        "| name | what it does | source | every | kB an exchange | kB a step | fewer |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        source = str(row["source"])
        number = source.removeprefix("arXiv:")
        linked = f"[{source}](https://arxiv.org/abs/{number})" if number != source else source
        sizes = (
            f"{row['exchange_bytes'] / 1e3:.1f} | {row['bytes_per_step'] / 1e3:.2f} | {row['reduction']:.0f}x"
        )
        lines.append(f"| `{row['name']}` | {row['does']} | {linked} | {row['every_steps']} | {sizes} |")
    return "\n".join(lines)
