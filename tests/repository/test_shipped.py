"""Every shipped sweep and tuning file stands for runs that would be accepted."""

from pathlib import Path

import pytest

from experiments.config import resolve_run
from experiments.sweep import expand, load_sweep
from experiments.tuning import as_sweep, load_tuning

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


def accepted(file):
    return lambda data: resolve_run(data, str(file), file.parent).plain()


@pytest.mark.parametrize("file", sorted((EXPERIMENTS / "sweeps").glob("*.yaml")), ids=lambda f: f.stem)
def test_a_shipped_sweep_is_accepted_and_has_its_baseline(file):
    assert len(expand(load_sweep(file), accepted(file))) > 1


TUNINGS = [f for f in sorted((EXPERIMENTS / "tuning").glob("*.yaml")) if not f.stem.endswith(".best")]


@pytest.mark.parametrize("file", TUNINGS, ids=lambda f: f.stem)
def test_a_shipped_tuning_gives_every_method_its_trials(file):
    tuning = load_tuning(file)
    assert len(expand(as_sweep(tuning), accepted(file))) == tuning.trials * len(tuning.methods)
