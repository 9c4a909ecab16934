"""`dilocox methods`: what every method sends, without running any."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli import app
from experiments.errors import RequestError
from experiments.methods_table import markdown, method_names, method_rows
from experiments.styles import style_of
from trainer.config import TrainerConfig
from trainer.planning import planned_traffic

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


@pytest.fixture(scope="module")
def rows():
    return {row["name"]: row for row in method_rows("decoder-1m", 2, 1)}


def test_the_documented_table_is_what_the_methods_say(rows):
    assert markdown(list(rows.values())) in PAGE.read_text(encoding="utf-8"), (
        "docs/methods.md: replace its table by experiments.methods_table.markdown(method_rows('decoder-1m', 2, 1))"
    )


def test_sizes_are_those_that_the_sources_claim(rows):
    parameters = rows["diloco"]["exchange_bytes"] / 4
    bits = {name: 8 * row["exchange_bytes"] / parameters for name, row in rows.items()}
    assert bits["allreduce"] == bits["local_sgd"] == bits["eager_diloco"] == 32
    assert bits["opendiloco"] == 16
    assert 8 < bits["intellect1"] < 8.3
    assert 4 < bits["streaming_diloco"] < 4.3
    assert 32 / 146 * 0.95 < bits["sparse_loco"] < 32 / 120  # 146x claimed for large tensors
    assert 0.1825 < bits["cocktail_sgd"] < 0.35  # positions in 12 bits here
    assert bits["noloco"] == 64  # pseudo-gradient and slow weights
    assert rows["diloco"]["reduction"] == pytest.approx(500)


@pytest.mark.parametrize(("replicas", "stages"), [(3, 1), (2, 2), (4, 2)])
def test_every_method_can_plan_every_layout(replicas, stages):
    for row in method_rows("decoder-0.4m", replicas, stages):
        assert row["exchange_bytes"] > 0, row["name"]


def test_all_rows_are_json_and_every_method_has_a_look_of_its_own():
    result = CliRunner().invoke(app, ["methods", "--model", "decoder-0.4m", "--json"])
    assert [row["name"] for row in json.loads(result.stdout)] == method_names()
    looks = [style_of(name) for name in method_names()]
    assert len({look.colour for look in looks}) == len({look.marker for look in looks}) == len(looks) == 13


def test_accumulation_is_counted_over_its_steps():
    config = TrainerConfig.model_validate(
        {"parallel": {"replicas": 2}, "method": {"accumulate": 4, "name": "allreduce"}}
    )
    assert planned_traffic(config).every_steps == 4


def test_an_unknown_model_is_refused():
    with pytest.raises(RequestError, match=r"model.preset: found 'gpt', allowed decoder"):
        method_rows("gpt", 2, 1)
