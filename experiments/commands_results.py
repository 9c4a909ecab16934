"""Commands that read results: nothing here starts or changes a run."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from experiments.errors import RequestError

if TYPE_CHECKING:
    import pandas as pd

out = Console(highlight=False)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="folder of a sweep, or of a run")]
Mixed = Annotated[
    bool, typer.Option("--mixed", help="compare runs of different code versions or machines all the same")
]


def results(
    directory: Directory,
    where: Annotated[
        str | None,
        typer.Option(metavar="EXPRESSION", help="rows, e.g. \"method == 'dilocox' and seed == 0\""),
    ] = None,
    columns: Annotated[str | None, typer.Option(metavar="A,B,...", help="columns of the summary")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="comma-separated values, every digit")] = False,
    to_loss: Annotated[
        float | None, typer.Option(metavar="NATS", help="what each run needed to reach this validation loss")
    ] = None,
    mixed: Mixed = False,
) -> None:
    """Print the table of a sweep. Example: dilocox results runs/quickstart --columns run_id,val_loss,speedup"""
    from experiments.results import load, summarise, table  # noqa: PLC0415
    from experiments.statistics import way_to_loss  # noqa: PLC0415

    summarise(directory)
    found = load(directory, mixed=mixed)
    if to_loss is None and where is None and columns is None and not csv:
        out.print(table(found, out.width))
        return
    frame = found.runs
    if to_loss is not None:
        evals = found.evals[found.evals["run_id"].isin(frame[frame["valid"]]["run_id"])]
        needed = way_to_loss(evals, to_loss)
        frame = needed.merge(frame[["run_id", "method", "seed"]], on="run_id")
    _print_frame(_chosen(frame, where, columns), csv=csv)


def _chosen(frame: "pd.DataFrame", where: str | None, columns: str | None) -> "pd.DataFrame":
    """Rows and columns that were asked for.

    Raises:
        RequestError: an expression that pandas refuses, or an unknown column.
    """
    if where is not None:
        try:
            frame = frame.query(where, engine="python")
        except Exception as error:  # pandas raises whatever the expression does
            raise RequestError(
                f"--where: found {where!r}, which pandas refuses ({' '.join(str(error).split())});"
                " allowed is a condition on columns, such as seed == 0"
            ) from error
    if columns is None:
        return frame
    wanted = [name.strip() for name in columns.split(",")]
    for name in wanted:
        if name not in frame.columns:
            raise RequestError(f"--columns: found {name!r}, allowed: {', '.join(map(str, frame.columns))}")
    return frame[wanted]


def _print_frame(frame: "pd.DataFrame", *, csv: bool) -> None:
    if csv:
        frame.to_csv(sys.stdout, index=False)
        return
    shown = Table(box=None, pad_edge=False)
    for name in frame.columns:
        shown.add_column(str(name), overflow="fold")
    for row in frame.itertuples(index=False):
        shown.add_row(*(f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in row))
    out.print(shown, markup=False)


def report(directory: Directory, mixed: Mixed = False) -> None:
    """Write report.html and the figures of a sweep. Example: dilocox report runs/quickstart"""
    from experiments.report import write_report  # noqa: PLC0415
    from experiments.results import load, summarise, table  # noqa: PLC0415

    summarise(directory)
    out.print(table(load(directory, mixed=mixed), out.width))
    path = write_report(directory, mixed=mixed)
    out.print(f"report:  {path}", soft_wrap=True)
    for figure in sorted((directory / "figures").glob("*.png")):
        out.print(f"figure:  {figure}", soft_wrap=True)


def status(directory: Directory) -> None:
    """How far a sweep is, from any terminal. Example: dilocox status runs/quickstart"""
    from experiments.status import status_of  # noqa: PLC0415

    runs = status_of(directory)
    shown = Table("run", "state", "step", "loss (nats)", "left", "", box=None, pad_edge=False)
    for run in runs:
        shown.add_row(
            run.run_id,
            run.state,
            f"{run.step}/{run.steps}" if run.steps else "",
            f"{run.loss:.3f}" if run.loss is not None else "",
            f"{run.left_s:.0f} s" if run.left_s is not None else "",
            run.reason,
        )
    out.print(shown, markup=False)
    over = sum(run.state in ("done", "invalid", "failed") for run in runs)
    out.print(f"{over} of {len(runs)} runs are over")
