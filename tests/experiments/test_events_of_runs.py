import pytest

from experiments.config import resolve_run
from experiments.errors import RequestError
from experiments.event_rows import event_rows
from experiments.happenings import TrainingProgress
from experiments.topology_plot import draw
from testbed.topology import load_topology

RUN = {"topology": "leo-satellite", "parallel": {"replicas": 2, "stages": 2}, "train": {"steps": 4}}
KILL = {"at_step": 2, "do": "kill", "node": "hub-0"}


def test_events_of_a_run_are_added_to_those_of_its_topology_or_stand_instead_of_them():
    own = load_topology("leo-satellite").events
    added = resolve_run({**RUN, "events": [KILL]}, "run.yaml").topology.events
    instead = resolve_run({**RUN, "events": {"instead": [KILL]}}, "run.yaml").topology.events
    assert [e.do for e in added] == ["rtt", "kill"]
    assert added[:1] == own
    assert [e.do for e in instead] == ["kill"]
    again = resolve_run(resolve_run({**RUN, "events": [KILL]}, "run.yaml").plain(), "config.yaml")
    assert again.topology.events == added


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"events": [{**KILL, "node": "hub-9"}]}, "unknown node 'hub-9'"),
        ({"events": "kill"}, "allowed is a list of events, or {instead: [...]}"),
        ({"events": [KILL], "topology": "loopback"}, "with topology loopback, allowed is an emulated one"),
        (
            {"events": [{"do": "trace", "link": "hub/up", "at_s": 0, "file": "no.csv"}]},
            "no.csv: cannot be read",
        ),
    ],
)
def test_events_that_a_run_cannot_have_are_refused_in_one_sentence(data, said):
    with pytest.raises(RequestError) as caught:
        resolve_run({**RUN, **data}, "run.yaml")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trace_of_a_run_is_found_beside_its_file_and_kept_in_the_resolved_run(tmp_path):
    (tmp_path / "up.csv").write_text("t_s,rate_mbps\n0,5\n1,6\n")
    trace = {"do": "trace", "link": "hub/up", "at_s": 0, "file": "up.csv"}
    config = resolve_run({**RUN, "events": [trace]}, str(tmp_path / "run.yaml"))
    assert config.topology.events[-1].points == [(0, 5), (1, 6)]


def test_progress_is_what_the_ranks_have_written_since_the_programs_began(tmp_path):
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    (ranks / "rank-0.steps.jsonl").write_text('{"step": 3}\n')
    reading = TrainingProgress(tmp_path)
    assert reading.began() is None  # of an earlier part of a resumed run
    (ranks / "rank-1.evals.jsonl").write_text('{"step": 3}\n')
    began = reading.began()
    assert began is not None
    assert reading.began() == began
    (ranks / "rank-1.steps.jsonl").write_text('{"step": 4}\n{"step": 5}\n{"st')
    (ranks / "rank-1.rounds.jsonl").write_text('{"round": 2}\n')
    assert (reading.read().step, reading.read().round) == (5, 2)


def test_a_report_lists_what_happened_what_failed_and_what_never_came():
    happened = {"event": 1, "what": "site a down", "asked_s": 1.0, "effect_s": 1.02, "late_s": 0.02}
    failed = {
        "event": 2,
        "what": "kill x",
        "asked_s": 3.0,
        "effect_s": None,
        "late_s": 0.0,
        "problem": "no x",
    }
    record = {
        "events": {
            "happened": [happened, failed],
            "traces": [{"event": 3, "changes": 7, "late_max_s": 0.004}],
            "not_reached": ["event 4 (at 99 s: thaw y)"],
        }
    }
    rows, notes = event_rows({"r": record, "quiet": {"events": None}})
    assert rows == [
        ["r", "1", "site a down", "1.00", "1.02", "20"],
        ["r", "2", "kill x: no x", "3.00", "never", "–"],
    ]
    assert notes == [
        "r: event 3, a trace, changed its link 7 times, at most 4 ms late",
        "r: not reached before the training ended: event 4 (at 99 s: thaw y)",
    ]


def test_a_figure_that_is_drawn_anew_and_the_events_are_in_the_picture():
    texts = [text.get_text() for text in draw(load_topology("leo-satellite")).axes[0].texts]
    assert "40 – 50 – 60 ms\nevery 15 s" in texts
    assert any(text.startswith("every 15 s: RTT field – hub: drawn from 30 to 90 ms") for text in texts)
