"""What is drawn is what was measured: checked on the lines and bars themselves, not on pixels."""

import matplotlib as mpl
import numpy as np
import pytest
from synthetic import EVERY, STEPS, write_run, write_sweep

from experiments import plots
from experiments.figures import all_figures, save
from experiments.results import load
from experiments.styles import style_of


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return load(write_sweep(tmp_path_factory.mktemp("runs") / "one"))


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    bad = {"valid": False, "status": "invalid", "reason": "late"}
    folder = write_sweep(
        tmp_path_factory.mktemp("runs") / "seeds", seeds=(0, 1, 2), changes={"diloco-s2": bad}
    )
    write_run(folder, "dilocox", 0, None, local_steps=40)
    return load(folder)


def drawn(axes):
    return {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}


def evals_of(results, run):
    return results.evals[results.evals["run_id"] == run].sort_values("step")


@pytest.mark.parametrize(
    ("draw", "column", "unit"),
    [
        (plots.loss_vs_tokens, "tokens", 1e3),
        (plots.loss_vs_time, "t", 1),
        (plots.loss_vs_wan_bytes, "wan_wire_bytes", 1e6),
    ],
)
def test_a_loss_line_is_the_frame(one, draw, column, unit):
    (axes,) = draw(one.runs, one.evals).axes
    assert set(drawn(axes)) == {"AllReduce", "DiLoCo", "DiLoCoX"}
    for method in ("allreduce", "diloco", "dilocox"):
        frame = evals_of(one, f"{method}-s0")
        if column == "wan_wire_bytes":
            frame = frame[frame[column] > 0]
        line = drawn(axes)[style_of(method).label]
        np.testing.assert_array_equal(line.get_xdata(), frame[column] / unit)
        np.testing.assert_array_equal(line.get_ydata(), frame["val_loss"])
        assert line.get_color() == style_of(method).colour and line.get_marker() == style_of(method).marker


def test_axes_say_their_units_and_the_evidence_is_on_the_figure(one):
    figure = plots.loss_vs_wan_bytes(one.runs, one.evals)
    (axes,) = figure.axes
    assert axes.get_ylabel() == "validation loss (nats/token)"
    assert "MB" in axes.get_xlabel() and axes.get_xscale() == "log"
    assert "evidence: trained, on emulated links; one seed" in figure.get_supxlabel()
    assert "wall time of training (s)" in plots.loss_vs_time(one.runs, one.evals).axes[0].get_xlabel()


def test_payload_is_drawn_and_named_where_no_wire_bytes_are_known(one):
    evals = one.evals.assign(wan_wire_bytes=float("nan"))
    (axes,) = plots.loss_vs_wan_bytes(one.runs, evals).axes
    assert "payload MB" in axes.get_xlabel() and len(drawn(axes)) == 3


def test_seeds_become_their_mean_and_range_without_the_invalid_one(seeds):
    (axes,) = plots.loss_vs_tokens(seeds.runs, seeds.evals).axes
    frames = [evals_of(seeds, f"diloco-s{seed}")["val_loss"].to_numpy() for seed in (0, 1)]
    np.testing.assert_allclose(drawn(axes)["DiLoCo"].get_ydata(), np.mean(frames, axis=0))
    assert len(axes.collections) == 3  # a band per configuration with more than one seed


def test_configurations_of_one_method_look_different(seeds):
    (axes,) = plots.loss_vs_tokens(seeds.runs, seeds.evals).axes
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in drawn(axes).values()}
    assert set(drawn(axes)) == {"AllReduce", "DiLoCo", "DiLoCoX, H=16", "DiLoCoX, H=40"}
    assert len(looks) == 4


def test_every_evaluation_after_the_start_is_inside_the_axes(one):
    for axes in plots.overview(one.runs, one.evals).axes:
        low, high = axes.get_ylim()
        after = one.evals[one.evals["step"] > 0]["val_loss"]
        assert low < after.min() and after.max() < high


def test_bars_are_bytes_per_token_with_their_value(one):
    (axes,) = plots.bytes_per_method(one.runs).axes
    assert [bar.get_width() for bar in axes.patches] == list(one.runs["wan_bytes_per_token"])
    assert axes.get_xscale() == "log" and "log scale" in axes.get_xlabel()
    assert [text.get_text() for text in axes.texts] == ["4,410", "276", "7.58"]


def test_the_time_budget_adds_up_to_what_was_booked(one):
    (axes,) = plots.time_budget(one.runs).axes
    ends = [
        max(bar.get_x() + bar.get_width() for bar in axes.patches if round(bar.get_y() + 0.3) == n)
        for n in range(3)
    ]
    columns = ["compute_s", "bubble_s", "compress_s", "exposed_comm_s", "other_s"]
    np.testing.assert_allclose(ends, 100 * one.runs[columns].sum(axis=1) / one.runs["wall_s"])


def test_link_use_integrates_to_the_bytes_of_the_uplinks(one):
    run = "allreduce-s0"
    links = one.links[one.links["run_id"] == run]
    rates = plots.uplink_rates(links, one.records[run])
    assert set(rates["unit"]) == {"%"}
    sent = (rates["mean"] / 100 * 1000 / 8e-6 * rates["seconds"]).sum()
    up = links[(links["link"] == "north/up") & (links["t"] >= 3.0)]["tx_bytes"]
    assert sent == pytest.approx(up.iloc[-1] - up.iloc[0])
    figure = plots.link_utilisation(one.runs, one.links, one.records)
    assert len(figure.axes) == 3
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    np.testing.assert_array_equal(figure.axes[0].patches[0].get_data().values, rates["mean"])


def test_without_rates_link_use_is_in_megabits(one):
    record = {**one.records["diloco-s0"], "links": {}}
    rates = plots.uplink_rates(one.links[one.links["run_id"] == "diloco-s0"], record)
    assert set(rates["unit"]) == {"Mbit/s"} and rates["mean"].max() > 1


def test_no_valid_run_no_figure_and_missing_series_fewer_figures(tmp_path):
    bad = {"valid": False, "status": "failed", "reason": "killed"}
    assert (
        all_figures(load(write_sweep(tmp_path / "bad", methods=("diloco",), changes={"diloco-s0": bad})))
        == []
    )
    folder = write_sweep(tmp_path / "few", methods=("diloco",))
    for name in ("evals", "links"):
        (folder / "diloco-s0" / f"{name}.parquet").unlink()
    assert [found.name for found in all_figures(load(folder))] == ["bytes-per-method", "time-budget"]


def test_drawing_leaves_matplotlib_as_it_was_and_files_are_written(one, tmp_path):
    before = dict(mpl.rcParams)
    png, pdf = save(plots.overview(one.runs, one.evals), tmp_path, "overview")
    assert dict(mpl.rcParams) == before
    assert png.read_bytes()[:4] == b"\x89PNG" and pdf.read_bytes()[:4] == b"%PDF"
    assert STEPS // EVERY == 10
