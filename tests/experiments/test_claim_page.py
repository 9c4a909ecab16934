"""The page states what its numbers carry, marks what nobody could read, and refuses unknown claims."""

import json
import re

import pytest
from typer.testing import CliRunner

from experiments.claim.page import as_data, examine, sentences
from experiments.claim.paper import load_claim
from experiments.cli import app
from experiments.errors import RequestError

CLAIM = load_claim("357x")
FOUND = examine(CLAIM)


def test_the_formula_meets_the_claim_within_ten_percent_given_the_published_throughput():
    assert FOUND.claimed == 357 and abs(FOUND.deviation) < 0.10
    assert FOUND.published_ratio == pytest.approx(358.5, abs=0.1)


def test_every_finding_is_computed_and_changes_with_its_figure():
    """A page with another published rate says other numbers."""
    other = load_claim("357x")
    rate = other.published["dilocox_tokens_per_s"]
    other.published["dilocox_tokens_per_s"] = type(rate)(
        rate.name, 2 * rate.value, rate.unit, False, rate.source
    )
    before, after = sentences(CLAIM, FOUND), sentences(other, examine(other))
    changed = [a != b for a, b in zip(before, after, strict=True)]
    assert changed[:2] == [True, True] and changed[3:5] == [True, True]


def test_a_round_at_a_usual_utilisation_does_not_hide_the_exchange():
    assert "does not hide" in " ".join(sentences(CLAIM, FOUND))


def test_what_nobody_read_in_the_source_is_named():
    assert {"allreduce_tokens_per_s", "local_steps", "gpus"} <= set(as_data(CLAIM, FOUND)["unverified"])
    assert "speedup" not in as_data(CLAIM, FOUND)["unverified"]


def test_the_command_prints_one_page_or_json():
    shown = CliRunner().invoke(app, ["claim", "357x"])
    assert shown.exit_code == 0, shown.output
    text = re.sub(r"\s+", " ", shown.output)
    assert "ratio of throughputs" in text and "verified: false" in text
    assert text.count("not examined by this version") == 4, (
        "no kind of evidence is claimed that was not gathered"
    )
    data = json.loads(CliRunner().invoke(app, ["claim", "357x", "--json"]).output)
    assert data["evidence"]["arithmetic"]["value"] == pytest.approx(FOUND.speedup)


def test_an_unknown_claim_is_refused_with_the_known_ones():
    with pytest.raises(RequestError, match="found '358x', allowed: 357x"):
        load_claim("358x")
