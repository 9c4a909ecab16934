"""Commands that train: single runs, sweeps, tuning; and what can be trained."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from experiments.command_line import PcapOption, SetOption, out, warn
from experiments.errors import RequestError


def run(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml")],
    overrides: SetOption = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="folder of the run")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest whole checkpoint in the folder")
    ] = False,
    pcap: PcapOption = None,
) -> None:
    """Execute one run. Example: dilocox run experiments/runs/dilocox.yaml --set train.steps=20"""
    from experiments.config import check_data, read_mapping, resolve_run  # noqa: PLC0415
    from experiments.overrides import apply_override  # noqa: PLC0415
    from experiments.progress import Reporter  # noqa: PLC0415
    from experiments.runner import run as execute_run  # noqa: PLC0415

    data = read_mapping(run_file)
    for override in overrides or []:
        apply_override(data, override)
    config = resolve_run(data, str(run_file), near=run_file.parent)
    check_data(config)
    if config.topology and not isinstance(config.topology, str):
        warn(config.topology)
    run_dir = output or Path("runs") / "single" / config.name
    with Reporter(out, config.name) as reporter:
        record = execute_run(config, run_dir, reporter, resume=resume, pcap=pcap or [])
    _print_record(record, run_dir)
    if record["status"] != "done":
        raise typer.Exit(1)


def export(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run that has ended")],
    to: Annotated[str, typer.Option("--to", help="format: hf")] = "hf",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="new folder; default RUN/hf")] = None,
) -> None:
    """Write a run's final weights for transformers. Example: dilocox export runs/single/run --to hf"""
    if to != "hf":
        raise RequestError(f"--to: found {to!r}, allowed: hf")
    from trainer.export import export_to_hf  # noqa: PLC0415
    from trainer.tensor_file import TensorFileError  # noqa: PLC0415

    target = output or run_folder / "hf"
    try:
        config = export_to_hf(run_folder, target)
    except TensorFileError as error:
        raise RequestError(str(error)) from error
    except FileExistsError as error:
        raise RequestError(f"--output: {error}, allowed is a new folder") from error
    out.print(f"{config['architectures'][0]}: {target}", soft_wrap=True)


def sweep(
    sweep_file: Annotated[Path, typer.Argument(metavar="SWEEP.yaml")],
    overrides: SetOption = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="folder of the sweep")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="keep the runs that have finished")] = False,
    retry: Annotated[
        bool, typer.Option("--retry", help="with --resume: redo failed and invalid runs")
    ] = False,
    any_version: Annotated[
        bool, typer.Option("--any-version", help="with --resume: keep runs that other code made")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the runs and stop")] = False,
) -> None:
    """Execute every run of a sweep. Example: dilocox sweep experiments/sweeps/quickstart.yaml"""
    from experiments.sweeping import execute_sweep, plan_sweep  # noqa: PLC0415

    plan = plan_sweep(sweep_file, overrides or [], output)
    if dry_run:
        for planned in plan.runs:
            out.print(planned.run_id)
        return
    if retry and not resume:
        raise RequestError("--retry: found it alone, allowed is --resume --retry")
    failures = execute_sweep(plan, out, resume=resume, retry=retry, any_version=any_version)
    out.print(f"results: {plan.folder}; report: dilocox report {plan.folder}", soft_wrap=True)
    if failures:
        out.print(f"{failures} of {len(plan.runs)} runs are not valid; to redo them: --resume --retry")
        raise typer.Exit(1)


def tune(
    tuning_file: Annotated[Path, typer.Argument(metavar="TUNING.yaml")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="folder of the trials")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="keep the trials that have finished")] = False,
) -> None:
    """Give every method the same number of trials. Example: dilocox tune experiments/tuning/ablation.yaml"""
    from experiments.sweeping import execute_tuning  # noqa: PLC0415
    from experiments.tuning import load_tuning  # noqa: PLC0415

    tuning = load_tuning(tuning_file)
    folder = output or Path("runs") / "tuning" / tuning.name
    table = Table("method", "nats per token (tuning text)", "valid trials", "chosen", box=None)
    for choice in execute_tuning(tuning, tuning_file, folder, out, resume=resume):
        chosen = ", ".join(f"{key}={value}" for key, value in choice.drawn.items())
        table.add_row(choice.label, f"{choice.loss:.4f}", f"{choice.valid} of {choice.trials}", chosen)
    out.print(table)
    out.print(f"chosen settings, for a sweep's list: {folder / 'best.yaml'}", soft_wrap=True)


def methods(
    model: Annotated[str, typer.Option(help="a model preset")] = "decoder-1m",
    replicas: Annotated[int, typer.Option(min=1, help="D, the replicas that must agree")] = 2,
    stages: Annotated[int, typer.Option(min=1, help="M, pipeline stages of a replica")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON list")] = False,
) -> None:
    """What every method does and sends, nothing run. Example: dilocox methods --model decoder-4m --replicas 4"""
    from experiments.methods_table import method_rows, table  # noqa: PLC0415

    rows = method_rows(model, replicas, stages)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    out.print(table(rows, out.width))
    out.print(
        f"Payload that a replica of {model} sends to the others ({replicas} in all), mean over replicas;"
        " defaults of the sources.",
        soft_wrap=True,
    )


def _print_record(record: dict[str, Any], run_dir: Path) -> None:
    totals = record["totals"]
    out.print(
        f"status: {record['status']}" + (f" ({record['reason']})" if record["reason"] else ""), soft_wrap=True
    )
    if totals.get("val_loss") is not None:
        out.print(
            f"validation loss {totals['val_loss']:.4f} nats per token, {totals['tokens_per_s']:.0f} tokens/s,"
            f" {totals['wan_payload_bytes'] / 1e6:.2f} MB of payload between replicas",
            soft_wrap=True,
        )
    for capture in record["captures"]:
        if capture["packets"] is None or capture["lost_packets"]:
            missing = "its end" if capture["packets"] is None else f"{capture['lost_packets']} packets"
            out.print(f"the capture of {capture['link']} lacks {missing}")
    out.print(f"files: {run_dir}", soft_wrap=True)
