"""Reading runs, and setting them against their baseline."""

import json
import math

import pandas as pd
import pytest
from synthetic import EVERY, STEPS, write_run, write_sweep

from experiments import results as lab
from experiments.bytecurve import with_wan_bytes
from experiments.columns import RATIOS, SUMMARY
from experiments.comparison import speedup_to_loss, time_to_loss
from experiments.errors import RequestError


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return write_sweep(tmp_path_factory.mktemp("runs") / "quickstart", seeds=(0, 1))


def by_id(runs):
    return runs.set_index("run_id")


def test_summary_has_the_contract_columns_and_every_varied_key(sweep):
    runs = lab.summarise(sweep)
    assert list(runs.columns[: len(SUMMARY)]) == list(SUMMARY)
    assert {"method.name", "method.compressor.rank"} <= set(runs.columns)
    assert "train.lr" not in runs.columns
    again = pd.read_parquet(sweep / "summary.parquet")
    assert list(again["run_id"]) == list(runs["run_id"])
    assert not list(sweep.glob("*.tmp"))


def test_ratios_are_against_the_baseline_of_the_same_seed(sweep):
    runs = by_id(lab.load(sweep).runs)
    for seed in (0, 1):
        base, own = runs.loc[f"allreduce-s{seed}"], runs.loc[f"dilocox-s{seed}"]
        assert own["baseline"] == f"allreduce-s{seed}"
        assert own["volume_reduction"] == pytest.approx(
            base["wan_bytes_per_token"] / own["wan_bytes_per_token"]
        )
        assert own["speedup"] == pytest.approx(own["tokens_per_s"] / base["tokens_per_s"])
        assert own["loss_gap"] == pytest.approx(own["val_loss"] - base["val_loss"])
        assert [base[ratio] for ratio in RATIOS] == [1, 1, 1, 0]


def test_the_fastest_baseline_is_taken(tmp_path):
    folder = write_sweep(tmp_path / "s")
    write_run(folder, "allreduce", 0, None, wire="bf16")
    totals = json.loads((folder / "allreduce-bf16-s0" / "record.json").read_text())
    totals["totals"]["tokens_per_s"] *= 2
    (folder / "allreduce-bf16-s0" / "record.json").write_text(json.dumps(totals))
    runs = by_id(lab.load(folder).runs)
    assert set(runs["baseline"]) == {"allreduce-bf16-s0"}
    assert runs.loc["allreduce-s0", "speedup"] == pytest.approx(0.5)


@pytest.mark.parametrize("key", ["seed", "model", "topology", "compute"])
def test_runs_under_other_conditions_are_not_compared(tmp_path, key):
    import yaml  # noqa: PLC0415

    folder = write_sweep(tmp_path / "s", methods=("allreduce", "diloco"))
    config_file, record_file = (folder / "diloco-s0" / name for name in ("config.yaml", "record.json"))
    config, record = yaml.safe_load(config_file.read_text()), json.loads(record_file.read_text())
    config[key] = record["seed"] = 7
    if key != "seed":
        record["seed"] = 0
    config_file.write_text(yaml.safe_dump(config))
    record_file.write_text(json.dumps(record))
    row = by_id(lab.load(folder).runs).loc["diloco-s0"]
    assert row["baseline"] is None or pd.isna(row["baseline"])
    assert row[list(RATIOS)].isna().all()


def test_times_without_an_emulated_network_are_not_compared(tmp_path):
    counted = {f"{method}-s0": {"evidence": "counted"} for method in ("allreduce", "diloco")}
    folder = write_sweep(tmp_path / "s", methods=("allreduce", "diloco"), changes=counted)
    row = by_id(lab.load(folder).runs).loc["diloco-s0"]
    assert row[["speedup", "speedup_to_loss"]].isna().all()
    assert row["volume_reduction"] == pytest.approx(16) and math.isfinite(row["loss_gap"])


def test_invalid_runs_keep_their_row_and_are_nobodys_baseline(tmp_path):
    bad = {"valid": False, "status": "invalid", "reason": "RTT 38 ms"}
    folder = write_sweep(tmp_path / "s", changes={"allreduce-s0": bad})
    runs = by_id(lab.load(folder).runs)
    assert runs.loc["allreduce-s0", "reason"] == "RTT 38 ms"
    assert runs[list(RATIOS)].isna().all(axis=None) and runs["baseline"].isna().all()


def test_invalid_seeds_are_not_averaged_in(tmp_path):
    bad = {"valid": False, "status": "invalid", "reason": "late"}
    folder = write_sweep(tmp_path / "s", seeds=(0, 1, 2), changes={"diloco-s2": bad})
    results = lab.load(folder)
    losses = by_id(results.runs).loc[["diloco-s0", "diloco-s1"], "val_loss"]
    text = lab.table_text(results)
    line = next(line for line in text.splitlines() if line.startswith("DiLoCo "))
    assert f"{losses.mean():.3f}" in line and "2 of 3" in line
    assert "diloco-s2: invalid: late" in text


def test_missing_files_and_a_cut_short_run_do_not_stop_the_rest(tmp_path):
    folder = write_sweep(tmp_path / "s")
    (folder / "diloco-s0" / "record.json").unlink()
    for name in ("steps", "evals", "rounds", "links"):
        (folder / "dilocox-s0" / f"{name}.parquet").unlink()
    (folder / "allreduce-s0" / "links.parquet").write_bytes(b"not parquet")
    results = lab.load(folder)
    runs = by_id(results.runs)
    assert not runs.loc["diloco-s0", "valid"] and "cut short" in runs.loc["diloco-s0", "reason"]
    assert runs.loc["diloco-s0", "method"] == "diloco"
    assert runs.loc["dilocox-s0", "volume_reduction"] > 100
    assert math.isnan(runs.loc["dilocox-s0", "speedup_to_loss"])
    lab.summarise(folder)


def test_one_run_and_its_own_folder(sweep):
    results = lab.load(sweep / "diloco-s0")
    assert list(results.runs["run_id"]) == ["diloco-s0"]
    assert set(results.evals["run_id"]) == {"diloco-s0"}


def test_a_newer_schema_and_an_empty_folder_are_one_sentence(tmp_path):
    with pytest.raises(RequestError, match="no such folder"):
        lab.load(tmp_path / "none")
    with pytest.raises(RequestError, match="no run in it"):
        lab.load(tmp_path)
    folder = write_sweep(
        tmp_path / "s", methods=("allreduce",), changes={"allreduce-s0": {"schema_version": 99}}
    )
    with pytest.raises(RequestError, match="newer version"):
        lab.load(folder)


def test_bytes_at_an_evaluation_follow_the_payload_and_end_at_the_kernels_count(sweep):
    results = lab.load(sweep)
    for run, total in by_id(results.runs)["wan_wire_bytes"].items():
        curve = results.evals[results.evals["run_id"] == run].set_index("step")["wan_wire_bytes"]
        assert curve[0] == 0 and curve[STEPS] == pytest.approx(total)
        assert curve.is_monotonic_increasing
        assert curve[EVERY] == pytest.approx(total * EVERY / STEPS)


def test_bytes_from_the_uplinks_counters_where_steps_carry_none():
    evals = pd.DataFrame({"step": [0, 1, 2], "t": [0.0, 1.0, 2.0]})
    steps = pd.DataFrame({"step": [1, 2], "payload_bytes": [0, 0]})
    links = pd.DataFrame(
        {"t": [0.0, 5.0, 7.0] * 2, "link": ["a/up"] * 3 + ["a-0"] * 3, "tx_bytes": [0, 100, 300, 9, 9, 9]}
    )
    totals = {"wan_links": ["a/up"], "train_began_t": 5.0}
    assert list(with_wan_bytes(evals, steps, links, totals)["wan_wire_bytes"]) == [0, 100, 200]
    assert with_wan_bytes(evals, steps, links, {})["wan_wire_bytes"].isna().all()


def evals(*points):
    return pd.DataFrame(points, columns=["t", "val_loss"])


def test_time_to_loss_interpolates_and_is_undefined_where_never_reached():
    curve = evals((0, 5.0), (10, 3.0), (20, 2.0))
    assert time_to_loss(curve, 2.5) == 15
    assert time_to_loss(curve, 3.0) == 10
    assert math.isnan(time_to_loss(curve, 1.9))


def test_speedup_to_loss_takes_the_higher_of_the_two_last_losses():
    base, own = evals((0, 5.0), (100, 3.0), (200, 2.0)), evals((0, 5.0), (10, 3.0))
    assert speedup_to_loss(base, own) == 10
    assert math.isnan(speedup_to_loss(base, evals((0, 5.0), (10, math.nan))))
    assert math.isnan(speedup_to_loss(base, evals()))


def test_the_table_says_what_tells_configurations_apart(tmp_path):
    folder = write_sweep(tmp_path / "s", methods=("allreduce",))
    for progress in ("keep", "discard"):
        write_run(folder, "dilocox", 0, None, overlap={"delay_rounds": 1, "progress": progress})
    text = lab.table_text(lab.load(folder))
    assert "overlap.progress=keep" in text and "overlap.progress=discard" in text
