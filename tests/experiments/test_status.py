"""What another terminal sees of a sweep, and what is never compared by accident."""

import json
import os
import time

import pytest
import yaml
from synthetic import write_sweep
from typer.testing import CliRunner

from experiments import results as lab
from experiments.cli import app
from experiments.codeversion import sources
from experiments.errors import RequestError
from experiments.status import RunStatus, status_of, write_plan


def a_run(folder, steps=(), record=None, age_s=0.0):
    (folder / "ranks").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"train": {"steps": 10}}))
    for rank, done in enumerate(steps):
        lines = [json.dumps({"step": s, "t": 2.0 * s, "loss": 3.0 - s / 10}) for s in range(1, done + 1)]
        (folder / "ranks" / f"rank-{rank}.steps.jsonl").write_text("\n".join(lines) + "\n")
    if record:
        (folder / "record.json").write_text(json.dumps(record))
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - age_s,) * 2)


def test_every_planned_run_has_a_state(tmp_path):
    write_plan(tmp_path, ["first", "second", "third", "fourth"])
    a_run(tmp_path / "first", (10, 10), {"status": "done", "totals": {"steps": 10, "val_loss": 2.0}})
    a_run(tmp_path / "second", (4, 5))
    a_run(tmp_path / "third", (4, 5), age_s=1000)
    found = status_of(tmp_path)
    assert [(run.run_id, run.state, run.step) for run in found] == [
        ("first", "done", 10),
        ("second", "running", 4),
        ("third", "interrupted", 4),
        ("fourth", "planned", 0),
    ]
    assert found[1].left_s == pytest.approx(10.0 / 4 * 6), "the slowest rank's step, the longest time so far"
    assert status_of(tmp_path / "second") == [found[1]]


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(RequestError, match="no such folder"):
        status_of(tmp_path / "none")
    with pytest.raises(RequestError, match="neither a sweep's plan"):
        status_of(tmp_path)


def test_the_command_counts_what_is_over(tmp_path):
    write_plan(tmp_path, ["a", "b"])
    shown = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert shown.exit_code == 0 and "0 of 2 runs are over" in shown.output
    assert RunStatus("a", "planned") in status_of(tmp_path)


def rewrite_record(folder, **changes):
    path = folder / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"code_version": "abc"}, "code version: "), ({"machine": {"cpu": "other", "cores": 64}}, "machine: ")],
)
def test_runs_of_different_code_or_machines_are_compared_only_when_asked(tmp_path, changes, what):
    folder = write_sweep(tmp_path / "q", methods=("diloco", "allreduce"))
    rewrite_record(folder / "diloco-s0", **changes)
    with pytest.raises(RequestError, match=f"more than one {what}"):
        lab.load(folder)
    assert len(lab.load(folder, mixed=True).runs) > 1
    rewrite_record(folder / "diloco-s0", valid=False)
    assert len(lab.load(folder).runs) > 1, "a run that does not count is compared with nothing"


def test_the_version_of_the_code_covers_what_makes_a_result_and_no_figure():
    names = {str(path).rpartition("/")[2] for path in sources()}
    assert {"train.py", "network.py", "runner.py", "accounting.py"} <= names
    assert not {"plots.py", "report.py", "tables.py"} & names


def ask(folder, *options):
    return CliRunner().invoke(app, ["results", str(folder), *options])


def test_rows_and_columns_can_be_chosen_and_exported_in_full(tmp_path):
    folder = write_sweep(tmp_path / "q", methods=("diloco", "allreduce"))
    shown = ask(
        folder, "--where", "method == 'diloco' and seed == 0", "--columns", "run_id,val_loss", "--csv"
    )
    head, row = shown.output.strip().splitlines()
    frame = lab.load(folder).runs.set_index("run_id")
    assert head == "run_id,val_loss"
    assert row == f"diloco-s0,{frame.loc['diloco-s0', 'val_loss']}"
    assert "diloco-s0" in ask(folder, "--columns", "run_id").output
    target = ask(folder, "--to-loss", "4.0", "--csv").output.splitlines()
    assert target[0] == "run_id,tokens,t,wan_wire_bytes,method,seed" and len(target) == len(frame) + 1


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--columns", "loss"), "found 'loss', allowed: run_id"), (("--where", "seed = 0"), "pandas refuses")],
)
def test_a_wrong_question_is_one_sentence(tmp_path, options, said):
    folder = write_sweep(tmp_path / "q", methods=("diloco",))
    found = ask(folder, *options)
    assert isinstance(found.exception, RequestError) and said in str(found.exception)
