"""Golden trajectories: what every method made of one small problem, kept as numbers.

`pytest tests/trainer/test_golden.py --rewrite-golden` writes them anew; the difference belongs into the review.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from methods_under_test import METHODS, changes

FOLDER = Path(__file__).with_name("golden")

# Another CPU adds in another order: last bits differ, and a value at the edge of a quantiser's step may fall to
# the other side. A wrong sign, a delta applied twice or a round late are a hundred times larger.
LOSS_RTOL, NORM_RTOL, PROJECTION_ATOL = 2e-3, 1e-3, 5e-3


def trajectory(run) -> dict:
    """Validation of the outer parameters as they move, rounds, and each final tensor's norm and one projection.

    The projection is on a seeded direction of the tensor's size, in units of its norm.
    """
    parameters = {}
    for name, tensor in sorted(run.parameters.items()):
        flat = tensor.reshape(-1).astype(np.float64)
        direction = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(flat.size)
        norm = np.linalg.norm(flat)
        parameters[name] = [float(norm), float(flat @ direction / np.linalg.norm(direction) / norm)]
    keys = ("round", "local_steps", "step", "rank_r", "payload_bytes", "delta_norm")
    return {
        "validation": [[e["step"], e["val_loss"]] for e in run.evals],
        "rounds": [[record[key] for key in keys] for record in run.rounds[0]],
        "parameters": parameters,
    }


@pytest.mark.parametrize("name", METHODS)
def test_every_method_still_moves_the_outer_parameters_as_it_did(runs, request, name):
    found = trajectory(runs(**changes(name)))
    file = FOLDER / f"{name.replace(' ', '-')}.json"
    if request.config.getoption("--rewrite-golden"):
        FOLDER.mkdir(exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n")
    how = f"if {name} was meant to change: pytest {Path(__file__).name} --rewrite-golden, and review {file.name}"
    assert file.is_file(), how
    kept = json.loads(file.read_text())
    np.testing.assert_allclose(
        np.array(found["validation"]), np.array(kept["validation"]), rtol=LOSS_RTOL, err_msg=how
    )
    assert [r[:5] for r in found["rounds"]] == [r[:5] for r in kept["rounds"]], how
    np.testing.assert_allclose(
        [r[5] for r in found["rounds"]], [r[5] for r in kept["rounds"]], rtol=1e-2, err_msg=how
    )
    assert found["parameters"].keys() == kept["parameters"].keys(), how
    norms, projections = (
        [np.array([row[i] for row in source["parameters"].values()]) for source in (found, kept)]
        for i in (0, 1)
    )
    np.testing.assert_allclose(*norms, rtol=NORM_RTOL, err_msg=how)
    np.testing.assert_allclose(*projections, rtol=0, atol=PROJECTION_ATOL, err_msg=how)


def test_there_is_no_golden_file_of_a_method_that_is_gone():
    assert {file.stem for file in FOLDER.glob("*.json")} == {name.replace(" ", "-") for name in METHODS}
