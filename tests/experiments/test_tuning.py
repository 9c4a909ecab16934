"""The same budget for every method, the same trials every time, and a choice that can be traced."""

import pandas as pd
import pytest
import yaml

from experiments.config import resolve_run
from experiments.errors import RequestError
from experiments.sweep import expand, ids_by_point, load_sweep
from experiments.tuning import as_sweep, choose, load_tuning, trials_of, write_choices

TUNING = {
    "name": "t",
    "base": {"train": {"steps": 4, "batch_size": 8}},
    "trials": 8,
    "space": {
        "train.lr": {"log": [0.001, 0.016]},
        "train.warmup_steps": {"choice": [0, 2]},
        "method.outer.momentum": {"linear": [0.0, 0.9]},
    },
    "methods": {
        "plain": {"name": "allreduce"},
        "local": {"name": "diloco", "local_steps": 2, "outer": {"name": "nesterov"}},
    },
}


def tuning_of(tmp_path, **changes):
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(TUNING | changes, sort_keys=False))
    return load_tuning(tmp_path / "t.yaml")


def ids(tuning):
    found = ids_by_point(as_sweep(tuning), lambda data: resolve_run(data, "t.yaml").plain())
    return {label: found[8 * n : 8 * n + 8] for n, label in enumerate(tuning.methods)}


def planned(tuning):
    return expand(as_sweep(tuning), lambda data: resolve_run(data, "t.yaml").plain())


def test_every_method_gets_the_same_number_of_trials_and_always_the_same_ones(tmp_path):
    tuning = tuning_of(tmp_path)
    runs = planned(tuning)
    methods = [run.config["method"]["name"] for run in runs]
    assert methods.count("allreduce") == methods.count("diloco") == 8
    assert [run.run_id for run in planned(tuning_of(tmp_path))] == [run.run_id for run in runs]
    assert [run.run_id for run in planned(tuning_of(tmp_path, seed=1))] != [run.run_id for run in runs]


def test_trials_fill_the_space_evenly_and_keep_to_the_keys_that_a_method_has(tmp_path):
    trials = trials_of(tuning_of(tmp_path), "plain")
    assert all(trial["method"] == {"name": "allreduce"} for trial in trials)
    octave = [sum(low <= t["train"]["lr"] < 2 * low for t in trials) for low in (0.001, 0.002, 0.004, 0.008)]
    assert octave == [2, 2, 2, 2], "a Sobol sequence puts equally many into equal parts"
    local = trials_of(tuning_of(tmp_path), "local")
    assert all(0 <= trial["method"]["outer"]["momentum"] <= 0.9 for trial in local)


def test_trials_are_judged_on_the_tuning_text(tmp_path):
    assert {run.config["eval"]["part"] for run in planned(tuning_of(tmp_path))} == {"tuning"}


def test_the_lowest_valid_loss_is_chosen_and_a_sweep_can_read_it(tmp_path):
    tuning = tuning_of(tmp_path)
    runs = planned(tuning)
    frame = pd.DataFrame(
        [
            {
                "run_id": run.run_id,
                "valid": number % 8 != 3,
                "val_loss": 3.0 - (number % 8 == 3) - 0.1 * (number % 8 == 5),
            }
            for number, run in enumerate(runs)
        ]
    )
    choices = choose(tuning, frame, ids(tuning))
    assert [(c.label, c.trials, c.valid) for c in choices] == [("plain", 8, 7), ("local", 8, 7)]
    assert [c.settings for c in choices] == [trials_of(tuning, label)[5] for label in ("plain", "local")]
    write_choices(choices, tmp_path / "best.yaml")
    (tmp_path / "s.yaml").write_text(
        yaml.safe_dump({"name": "s", "base": TUNING["base"], "list": "best.yaml"}, sort_keys=False)
    )
    swept = expand(load_sweep(tmp_path / "s.yaml"), lambda data: resolve_run(data, "s.yaml").plain())
    assert [run.config["train"]["lr"] for run in swept] == [c.settings["train"]["lr"] for c in choices]
    assert {run.config["eval"]["part"] for run in swept} == {"validation"}


def test_a_method_without_a_valid_trial_is_named(tmp_path):
    tuning = tuning_of(tmp_path)
    runs = planned(tuning)
    frame = pd.DataFrame(
        [{"run_id": r.run_id, "valid": r.config["method"]["name"] == "diloco", "val_loss": 1.0} for r in runs]
    )
    with pytest.raises(RequestError, match="plain: found no valid trial"):
        choose(tuning, frame, ids(tuning))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"space": {"train.lr": {"log": [0, 1]}}}, "bounds above 0"),
        ({"space": {"train.lr": {"log": [1, 2], "choice": [1]}}}, "one of log, linear, choice"),
        ({"space": {"train.lr": {"linear": [2, 1]}}}, "low below high"),
        ({"trials": 0}, "trials: found 0"),
        ({"metods": {}}, "metods"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path, changes, said):
    with pytest.raises(RequestError) as refused:
        tuning_of(tmp_path, **changes)
    assert said in str(refused.value) and str(refused.value).startswith(str(tmp_path / "t.yaml"))


def test_a_variant_is_never_credited_with_the_trial_of_another_one_that_has_its_keys(tmp_path):
    """`whole` names fewer keys than `cut`, so every trial of `cut` has all that `whole` asks for."""
    whole = {"name": "dilocox", "local_steps": 2, "outer": {"name": "nesterov"}}
    methods = {"whole": whole, "cut": {**whole, "compressor": {"name": "int4"}}}
    tuning = tuning_of(tmp_path, methods=methods)
    runs = planned(tuning)
    best = [run.run_id for run in runs if run.config["method"]["compressor"]["name"] == "int4"][3]
    frame = pd.DataFrame(
        [{"run_id": r.run_id, "valid": True, "val_loss": 1.0 if r.run_id == best else 2.0} for r in runs]
    )
    assert [choice.loss for choice in choose(tuning, frame, ids(tuning))] == [2.0, 1.0]
