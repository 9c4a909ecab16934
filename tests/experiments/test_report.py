"""A report says what the numbers carry, needs nothing else, and is there whatever is missing."""

import json
import re
from html.parser import HTMLParser

import pytest
from synthetic import write_sweep

from experiments import narrative
from experiments.figures import all_figures
from experiments.report import render, write_report
from experiments.results import load

VOID = {"meta", "img", "br", "hr"}


class Balanced(HTMLParser):
    """Fails on a tag that is not closed in order; collects links and text."""

    def __init__(self):
        super().__init__()
        self.open, self.links, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for key, value in attrs if key in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def read(text):
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    return " ".join(parser.words), parser.links


def change(folder, run, edit):
    path = folder / run / "record.json"
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))


def test_the_page_is_self_contained_and_complete(tmp_path):
    path = write_report(write_sweep(tmp_path / "q"))
    words, links = read(path.read_text(encoding="utf-8"))
    assert links and all(link.startswith("data:image/svg+xml;base64,") for link in links)
    assert "<script" not in path.read_text() and "url(" not in path.read_text()
    for expected in (
        "AllReduce",
        "30.21",
        "1.0550",
        "+0.040 %",
        "0123456789abcdef",
        "6.1.0-18-amd64",
        "wire bytes",
    ):
        assert expected in words
    assert {p.name for p in (tmp_path / "q" / "figures").iterdir()} >= {"overview.png", "overview.pdf"}


def test_two_reports_of_the_same_runs_are_the_same(tmp_path):
    results = load(write_sweep(tmp_path / "q", methods=("diloco",)))
    assert render(results, all_figures(results)) == render(results, all_figures(results))


def test_only_failed_runs_are_said_to_be_so(tmp_path):
    bad = {"valid": False, "status": "failed", "reason": "node south-1: killed", "totals": {}}
    folder = write_sweep(tmp_path / "q", changes={f"{m}-s0": bad for m in ("allreduce", "diloco", "dilocox")})
    words, links = read(write_report(folder).read_text())
    assert "None of the 3 runs in this folder is valid" in words
    assert words.count("node south-1: killed") == 3 and links == []
    assert "357" not in words


def test_one_run_with_nothing_but_a_record(tmp_path):
    folder = write_sweep(tmp_path / "q", methods=("diloco",))
    for file in (folder / "diloco-s0").glob("*.parquet"):
        file.unlink()
    for key in ("links", "fidelity", "accounting", "versions", "machine", "data", "commit", "kernel"):
        change(folder, "diloco-s0", lambda record, key=key: record.pop(key))
    words, _ = read(write_report(folder).read_text())
    assert (
        "One run, valid" in words
        and "No byte account was recorded" in words
        and "No link was measured" in words
    )


def test_everything_that_comes_from_outside_is_escaped(tmp_path):
    bad = {"valid": False, "status": "failed", "reason": "<script>alert(1)</script>", "name": "<b>x</b>"}
    folder = write_sweep(tmp_path / "q", methods=("diloco",), changes={"diloco-s0": bad})
    change(folder, "diloco-s0", lambda record: record["versions"].update(torch="<i>2</i>"))
    text = write_report(folder).read_text()
    assert "<script" not in text and "<b>" not in text and "<i>" not in text
    assert "&lt;script&gt;" in text


def sentences(folder):
    results = load(folder)
    return " ".join(narrative.summary(results.runs, results.records))


def test_the_numbers_of_the_summary_are_those_of_the_rows(tmp_path):
    folder = write_sweep(tmp_path / "q")
    row = load(folder).runs.set_index("run_id").loc["dilocox-s0"]
    text = sentences(folder)
    assert f"DiLoCoX sent {row['volume_reduction']:.0f} times fewer bytes" in text
    assert f"trained {row['speedup']:.2f} times as many tokens per second" in text
    assert f"{row['loss_gap']:.3f} nats per token higher" in text


def test_allreduce_a_little_slower_is_said_only_where_true(tmp_path):
    folder = write_sweep(tmp_path / "q")
    assert "only a little slower" in sentences(folder)
    assert "another ratio of communication to compute" in sentences(folder)

    def throttled(record):
        record["totals"]["exposed_comm_s"] = 0.6 * record["totals"]["wall_s"]

    change(folder, "allreduce-s0", throttled)
    assert "little slower" not in sentences(folder) and "60.0 % of its wall time" in sentences(folder)

    def scale_model(record):
        record["totals"]["exposed_comm_s"] = 0.9974 * record["totals"]["wall_s"]

    change(folder, "allreduce-s0", scale_model)
    assert "another ratio" not in sentences(folder)


def test_nothing_is_said_about_the_claim_without_trained_allreduce(tmp_path):
    folder = write_sweep(tmp_path / "q", methods=("diloco", "dilocox"))
    assert "357" not in sentences(folder) and "no ratios are given" in sentences(folder)
    counted = {f"{m}-s0": {"evidence": "counted"} for m in ("allreduce", "diloco")}
    folder = write_sweep(tmp_path / "c", methods=("allreduce", "diloco"), changes=counted)
    assert "357" not in sentences(folder)


@pytest.mark.parametrize(("factor", "word"), [(0.5, "lower"), (2, "higher")])
def test_the_direction_of_a_loss_gap_is_named(tmp_path, factor, word):
    folder = write_sweep(tmp_path / "q", methods=("allreduce", "diloco"))
    change(folder, "diloco-s0", lambda r: r["totals"].update(val_loss=r["totals"]["val_loss"] * factor))
    assert re.search(rf"nats per token {word} in validation loss", sentences(folder))


def test_render_needs_no_figures(tmp_path):
    assert "Figures" not in render(load(write_sweep(tmp_path / "q", methods=("diloco",))), [])
