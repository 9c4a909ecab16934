"""Executes a sweep: one run after the other, finished ones kept, a failed one no reason to stop."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from experiments.codeversion import code_version
from experiments.config import RunConfig, check_data, resolve_run
from experiments.errors import RequestError
from experiments.progress import Reporter
from experiments.results import summarise
from experiments.runner import run
from experiments.status import write_plan
from experiments.sweep import PlannedRun, SweepConfig, Validate, expand, ids_by_point, load_sweep
from experiments.tuning import Choice, TuningConfig, as_sweep, choose, write_choices
from testbed.errors import TestbedError

FINISHED = ("done", "invalid", "failed")
NOT_VALID = ("invalid", "failed")


@dataclass(frozen=True)
class SweepPlan:
    """A sweep whose every run has been checked; nothing has been started."""

    sweep: SweepConfig
    runs: list[PlannedRun]
    configs: dict[str, RunConfig]
    folder: Path


def plan_sweep(sweep_file: Path, overrides: list[str], output: Path | None) -> SweepPlan:
    """Reads, expands and checks a sweep, the text of every data source included.

    Raises:
        RequestError: anything wrong in any run, before the first one starts.
    """
    return checked_plan(load_sweep(sweep_file, overrides), sweep_file, output)


def checked_plan(sweep: SweepConfig, sweep_file: Path, output: Path | None) -> SweepPlan:
    """As `plan_sweep`, of a sweep that was read from `sweep_file` or made from it."""
    near = sweep_file.resolve().parent
    runs = expand(sweep, _validator(sweep_file))
    configs = {planned.run_id: resolve_run(planned.config, str(sweep_file), near) for planned in runs}
    for source in {config.data.model_dump_json(): config for config in configs.values()}.values():
        check_data(source)
    return SweepPlan(sweep, runs, configs, output or Path("runs") / sweep.name)


def _validator(sweep_file: Path) -> Validate:
    def validate(data: dict[str, Any]) -> dict[str, Any]:
        return resolve_run(data, str(sweep_file), sweep_file.resolve().parent).plain()

    return validate


def _earlier(run_dir: Path) -> tuple[str, str | None]:
    """(status, version of the code) of what lies in a run's folder."""
    try:
        record = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
        return str(record["status"]), record.get("code_version")
    except (OSError, ValueError, KeyError):
        return "none", None


def execute_sweep(
    plan: SweepPlan, console: Console, *, resume: bool, retry: bool, any_version: bool = False
) -> int:
    """Runs what is to be run (with ``retry`` also what ended as failed or invalid); returns how many are not valid.

    A run that another version of the code made does not count as finished, except with ``any_version``.

    Raises:
        RequestError: the folder already holds results and ``resume`` was not asked for.
        KeyboardInterrupt: after the current run is taken down; finished runs stay.
    """
    if not resume and plan.folder.exists() and any(plan.folder.iterdir()):
        raise RequestError(
            f"{plan.folder}: found results of an earlier sweep; allowed is --resume, or another folder with -o"
        )
    plan.folder.mkdir(parents=True, exist_ok=True)
    (plan.folder / "sweep.yaml").write_text(
        yaml.safe_dump(plan.sweep.model_dump(mode="json"), sort_keys=False), encoding="utf-8"
    )
    write_plan(plan.folder, [planned.run_id for planned in plan.runs])
    bad, version = 0, code_version()
    for number, planned in enumerate(plan.runs, start=1):
        run_dir = plan.folder / planned.run_id
        label = f"[{number}/{len(plan.runs)}] {planned.run_id}"
        earlier, made_by = _earlier(run_dir)
        other = earlier in FINISHED and made_by != version and not any_version
        if other:
            console.print(
                f"{label}: {earlier} earlier by another version of the code, run again", markup=False
            )
        elif resume and earlier in FINISHED and not (retry and earlier in NOT_VALID):
            console.print(f"{label}: {earlier} earlier", markup=False)
            bad += earlier in NOT_VALID
            continue
        try:
            with Reporter(console, label) as reporter:
                record = run(
                    plan.configs[planned.run_id], run_dir, reporter, resume=resume and earlier not in FINISHED
                )
        except TestbedError as error:
            console.print(f"{label}: {error}", markup=False)
            raise
        console.print(
            f"{label}: {record['status']} {record['reason']}".rstrip(), markup=False, soft_wrap=True
        )
        bad += record["status"] != "done"
    summarise(plan.folder)
    return bad


def execute_tuning(
    tuning: TuningConfig, tuning_file: Path, folder: Path, console: Console, *, resume: bool
) -> list[Choice]:
    """Runs all trials and writes `best.yaml` beside them; trials that are not valid are simply not chosen.

    Raises:
        RequestError: a trial that is refused, or a method without a single valid trial.
    """
    plan = checked_plan(as_sweep(tuning), tuning_file, folder)
    execute_sweep(plan, console, resume=resume, retry=False)
    ids = ids_by_point(plan.sweep, _validator(tuning_file))
    trials = {
        label: ids[number * tuning.trials : (number + 1) * tuning.trials]
        for number, label in enumerate(tuning.methods)
    }
    choices = choose(tuning, summarise(folder), trials)
    write_choices(choices, folder / "best.yaml")
    return choices
