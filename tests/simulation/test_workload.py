"""A workload says what it moves; a wrong one is refused in one sentence."""

import json

import pytest

from testbed.errors import TopologyError
from testbed.workload import Workload, load_workload

DILOCO = {
    "name": "diloco",
    "replicas": 3,
    "exchanges": {"delta": {"phases": [{"message_bytes": 100}, {"message_bytes": 40, "work_s": 0.5}]}},
    "program": [
        {
            "repeat": 5,
            "body": [
                {"do": "steps", "count": 20, "seconds": 0.1, "tokens": 64},
                {"do": "launch", "exchange": "delta"},
                {"do": "wait", "exchange": "delta"},
            ],
        }
    ],
}


def test_totals_follow_from_the_program():
    workload = Workload.model_validate(DILOCO)
    assert workload.steps == 100
    assert workload.tokens == 3 * 100 * 64
    assert workload.compute_s == pytest.approx(10.0)
    assert workload.sent_bytes == 5 * 2 * 140, "each of three members sends each message to two others"


@pytest.mark.parametrize(
    ("pattern", "times", "members", "sent"),
    [("everyone", 1, 4, 300), ("ring", 6, 4, 600), ("pair", 1, 4, 100), ("everyone", 1, 1, 0)],
)
def test_a_phase_knows_what_each_member_sends(pattern, times, members, sent):
    exchange = {"phases": [{"pattern": pattern, "message_bytes": 100, "times": times}]}
    workload = Workload.model_validate({**DILOCO, "replicas": members, "exchanges": {"delta": exchange}})
    assert workload.exchanges["delta"].sent_bytes(members) == sent


def test_json_and_yaml_come_back_as_the_same_workload(tmp_path):
    workload = Workload.model_validate(DILOCO)
    (tmp_path / "w.json").write_text(workload.to_json())
    assert load_workload(tmp_path / "w.json") == workload


LAUNCH, WAIT = {"do": "launch", "exchange": "delta"}, {"do": "wait", "exchange": "delta"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"program": [{"body": [LAUNCH]}]}, "never awaited"),
        ({"program": [{"body": [WAIT]}]}, "not running there"),
        ({"program": [{"repeat": 2, "body": [LAUNCH]}]}, "unequally often"),
        (
            {"program": [{"body": [{"do": "launch", "exchange": "x"}]}]},
            "found the exchange 'x', allowed: delta",
        ),
        ({"replicas": 0}, "replicas: found 0"),
        ({"programme": []}, "did you mean 'program'?"),
    ],
)
def test_a_wrong_workload_is_refused_in_one_sentence(tmp_path, changes, said):
    (tmp_path / "w.json").write_text(json.dumps({**DILOCO, **changes}))
    with pytest.raises(TopologyError) as refused:
        load_workload(tmp_path / "w.json")
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_an_exchange_may_be_under_way_from_one_repetition_to_the_next():
    steps = {"do": "steps", "seconds": 1.0}
    Workload.model_validate(
        {
            **DILOCO,
            "program": [
                {"body": [steps, LAUNCH]},
                {"repeat": 9, "body": [steps, WAIT, LAUNCH]},
                {"body": [WAIT]},
            ],
        }
    )
