import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import TopologyError
from testbed.events.changes import State, apply
from testbed.events.darkness import is_dark
from testbed.events.kinds import describe, verbs
from testbed.events.schedule import OnNode, Progress, Schedule, SetPath, SetRate, draw
from testbed.network import delay_asked
from testbed.plan import plan_network
from testbed.shaping import lines
from testbed.topology import SHIPPED, Topology, topology_from
from testbed.validation import load_yaml

BASE = {
    "name": "base",
    "sites": {"a": {"nodes": 2}, "b": {"nodes": 1}, "c": {"nodes": 1}},
    "wan": {
        "uplink": {"rate_mbps": 100},
        "pairs": [{"between": list(pair), "rtt_ms": 20} for pair in itertools.combinations("abc", 2)],
    },
}


def topology(*events: dict, **changes) -> Topology:
    return topology_from({**BASE, "events": list(events), **changes}, "wan.yaml")


def unfolded(*events: dict, until: float, progress: dict[float, Progress] | None = None):
    """(time, text) of everything that happens until a moment, in steps of 10 ms."""
    schedule = Schedule(topology(*events).events)
    found = []
    for tick in range(round(until * 100) + 1):
        now = tick / 100
        if progress and now in progress:
            schedule.reached(progress[now], now)
        found += [(round(due.at_s, 6), due.step.text) for due in schedule.due(now)]
    return found


def test_an_event_of_each_kind_unfolds_in_time():
    assert unfolded({"at_s": 1, "do": "rtt", "pair": ["a", "b"], "rtt_ms": 80, "for_s": 2}, until=5) == [
        (1.0, "RTT a – b: 80 ms"),
        (3.0, "RTT a – b as before"),
    ]
    assert unfolded({"every_s": 2, "times": 2, "do": "loss", "pair": ["a", "b"], "loss": 0.1}, until=9) == [
        (2.0, "loss a – b: 10 %"),
        (4.0, "loss a – b: 10 %"),
    ]
    assert unfolded(
        {"at_s": 1, "do": "flap", "site": "a", "period_s": 1, "down_s": 0.25, "for_s": 2.1}, until=9
    ) == [
        (1.0, "site a down"),
        (1.25, "site a up again"),
        (2.0, "site a down"),
        (2.25, "site a up again"),
        (3.0, "site a down"),
        (3.1, "site a up again"),
    ]
    assert unfolded({"at_s": 0, "do": "freeze", "node": "a-1", "for_s": 3}, until=9) == [
        (0.0, "freeze a-1"),
        (3.0, "thaw a-1"),
    ]
    points = [[0, 10], [0.5, 5]]
    trace = {"at_s": 1, "do": "trace", "link": "a/up", "points": points, "loop": True, "for_s": 1.2}
    assert unfolded(trace, until=9) == [
        (1.0, "trace on a/up: 10 Mbit/s"),
        (1.5, "trace on a/up: 5 Mbit/s"),
        (2.0, "trace on a/up: 10 Mbit/s"),
        (2.2, "trace on a/up ends"),
    ]


def test_steps_and_rounds_start_what_waits_for_them_once():
    events = (
        {"at_step": 5, "do": "kill", "node": "b-0"},
        {"at_round": 2, "every_s": 1, "times": 2, "do": "rate", "link": "a/up", "rate_mbps": 10},
    )
    progress = {0.5: Progress(4, 1), 1.0: Progress(7, 1), 2.0: Progress(8, 2), 3.0: Progress(9, 3)}
    assert unfolded(*events, until=5, progress=progress) == [
        (1.0, "kill b-0"),
        (2.0, "rate of a/up: 10 Mbit/s"),
        (3.0, "rate of a/up: 10 Mbit/s"),
    ]
    schedule = Schedule(topology(*events).events)
    assert schedule.not_reached() == [1, 2]
    assert schedule.next_s() is None


def test_events_of_one_moment_happen_in_the_order_of_the_list():
    events = [
        {"at_s": 1, "do": "down", "node": "b-0"},
        {"at_s": 1, "do": "kill", "node": "b-0"},
        {"at_s": 0.5, "every_s": 0.5, "times": 2, "do": "loss", "pair": ["a", "b"], "loss": 0},
    ]
    assert [text for _, text in unfolded(*events, until=2)] == [
        "loss a – b: 0 %",
        "node b-0 down",
        "kill b-0",
        "loss a – b: 0 %",
    ]


def test_drawn_values_are_the_same_in_two_runs_differ_by_turn_and_have_the_quartiles_asked_for():
    event = {
        "every_s": 1,
        "do": "rtt",
        "pair": ["a", "b"],
        "rtt_quartiles_ms": [30, 40, 50, 60, 90],
        "seed": 3,
    }
    one, other = unfolded(event, until=50), unfolded(event, until=50)
    assert one == other
    assert len({text for _, text in one}) > 40
    assert [text for _, text in unfolded({**event, "seed": 4}, until=50)] != [text for _, text in one]
    values = sorted(draw((30, 40, 50, 60, 90), f"0/1/{turn}") for turn in range(4000))
    assert values[0] >= 30
    assert values[-1] <= 90
    for share, quartile in ((0.25, 40), (0.5, 50), (0.75, 60)):
        assert values[int(share * 4000)] == pytest.approx(quartile, abs=1.5)


def changed(state: State, *changes, base) -> State:
    for change in changes:
        state = apply(state, change, base)
    return state


def test_changes_touch_only_what_they_name_and_can_be_undone():
    base = plan_network(topology())
    state = changed(
        State(base),
        SetRate("a/up", 10.0),
        SetRate("b/down", 5.0),
        SetPath(("a", "b"), "rtt_ms", 90),
        base=base,
    )
    assert state.plan.wan_rate_mbps("a", "b") == 5
    assert state.plan.wan_rate_mbps("a", "c") == 10
    assert state.plan.wan_rate_mbps("c", "b") == 5
    assert state.plan.wan_rate_mbps("b", "c") == 100
    assert (state.plan.rtt_ms("a", "b"), state.plan.rtt_ms("b", "c")) == (90, 20)
    undone = changed(
        state, SetRate("a/up", None), SetRate("b/down", None), SetPath(("b", "a"), "rtt_ms", None), base=base
    )
    assert undone.plan == base


def test_only_the_commands_of_what_changed_are_run():
    base = plan_network(topology())
    new = apply(State(base), SetRate("b/down", 5.0), base).plan
    for delay, classes in (("nfqueue", 2), ("netem", 4)):
        commands = lines.changes(base, new, delay)
        assert list(commands) == ["wan-core"]
        changes = [c for c in commands["wan-core"] if c.startswith("class change dev s2 ")]
        assert len(changes) == classes
        assert all(" ceil 5000000bit " in line for line in changes)
        assert not any(" add " in line for line in commands["wan-core"])


def cut_pairs(state: State) -> set[str]:
    return {
        f"{d.source}{d.target}" for d in state.plan.delays if d.source < d.target and is_dark(state.plan, d)
    }


@pytest.mark.parametrize(
    ("event", "dark"),
    [
        ({"do": "down", "site": "a"}, {"ab", "ac"}),
        ({"do": "down", "pair": ["c", "b"]}, {"bc"}),
        ({"do": "down", "link": "b/up"}, {"ab", "bc"}),
        ({"do": "down", "link": "b/down"}, {"ab", "bc"}),
        ({"do": "down", "node": "b-0"}, {"ab", "bc"}),
        ({"do": "down", "node": "a-0"}, set()),  # a-1 still reaches everybody
        ({"do": "partition", "sites": ["a"]}, {"ab", "ac"}),
        ({"do": "partition", "sites": ["a", "c"]}, {"ab", "bc"}),
    ],
    ids=str,
)
def test_what_is_down_is_dark_and_nothing_else_and_comes_back(event, dark):
    whole = topology({"at_s": 1, "for_s": 1, **event})
    base = plan_network(whole)
    schedule = Schedule(whole.events)
    state = State(base)
    for moment, wanted in ((1.0, dark), (2.0, set())):
        for due in schedule.due(moment):
            state = changed(state, *due.step.changes, base=base)
        assert cut_pairs(state) == wanted
    assert state.plan == base


def test_a_place_that_two_events_cut_stays_cut_until_both_let_go_and_up_ends_all():
    whole = topology(
        {"at_s": 1, "do": "down", "site": "a", "for_s": 4},
        {"at_s": 2, "do": "partition", "sites": ["a"], "for_s": 1},
        {"at_s": 6, "do": "down", "pair": ["b", "c"]},
        {"at_s": 7, "do": "up", "pair": ["a", "b"]},
        {"at_s": 8, "do": "up"},
    )
    base = plan_network(whole)
    schedule, state, seen = Schedule(whole.events), State(base), []
    for moment in (1, 2, 3, 5, 6, 7, 8):
        for due in schedule.due(moment):
            state = changed(state, *due.step.changes, base=base)
        seen.append(len(cut_pairs(state)))
    assert seen == [2, 2, 2, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"do": "kill", "node": "a-7", "at_s": 1}, "events.0: found the unknown node 'a-7'; allowed: a-0, a-1"),
        ({"do": "rtt", "pair": ["a", "d"], "rtt_ms": 1, "at_s": 1}, "unknown site 'd'; allowed: a, b, c"),
        ({"do": "rate", "link": "a/upp", "rate_mbps": 1, "at_s": 1}, "unknown link 'a/upp'; allowed: a/up"),
        ({"do": "rate", "link": "a/up", "rate_mbps": 0, "at_s": 1}, "allowed is a rate of 0.008"),
        ({"do": "explode", "at_s": 1}, "events.0.do: found 'explode', allowed: 'rate', 'rtt'"),
        ({"at_s": 1}, "events.0.do: found nothing"),
        ({"do": "thaw", "node": "a-0"}, "exactly one of at_s, at_step, at_round"),
        ({"do": "thaw", "node": "a-0", "at_s": 1, "at_step": 1}, "exactly one of at_s, at_step, at_round"),
        ({"do": "down", "at_s": 1}, "exactly one of site, pair, node, link"),
        ({"do": "down", "site": "a", "node": "a-0", "at_s": 1}, "exactly one of site, pair, node, link"),
        ({"do": "rtt", "pair": ["a", "b"], "rtt": 5, "at_s": 1}, "unknown key; did you mean 'rtt_ms'?"),
        ({"do": "rtt", "pair": ["a", "a"], "rtt_ms": 5, "at_s": 1}, "allowed are two different sites"),
        ({"do": "rtt", "pair": ["a", "b"], "jitter_ms": 11, "at_s": 1}, "at most half the RTT"),
        ({"do": "rtt", "pair": ["a", "b"], "rtt_quartiles_ms": [3, 2, 4, 5, 6], "at_s": 1}, "five ascending"),
        ({"do": "down", "site": "a", "every_s": 5, "for_s": 5}, "allowed is less than every_s (5)"),
        ({"do": "flap", "site": "a", "at_s": 0, "period_s": 1, "down_s": 1}, "allowed is at most period_s"),
        ({"do": "partition", "sites": ["a", "b", "c"], "at_s": 1}, "nobody would be cut off"),
        ({"do": "loss", "pair": ["a", "b"], "loss": 0.7, "at_s": 1}, "less than or equal to 0.5"),
        ({"do": "trace", "link": "a/up", "at_s": 1, "file": "nowhere.csv"}, "nowhere.csv: cannot be read"),
        ({"do": "trace", "link": "a/up", "at_s": 1, "points": [[1, 5], [1, 6]]}, "point 2: found t_s 1 after 1"),
        ({"do": "kill", "node": "a-0", "at_s": 1, "times": 2}, "times: found without every_s"),
    ],
    ids=lambda v: v if isinstance(v, str) else v.get("do", "nothing"),
)  # fmt: skip
def test_what_cannot_happen_is_refused_in_one_sentence(event, said):
    with pytest.raises(TopologyError) as caught:
        topology(event)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_events_on_sites_need_a_wan():
    alone = {"name": "alone", "sites": {"a": {"nodes": 2}}}
    events = [{"at_s": 1, "do": "down", "site": "a"}]
    with pytest.raises(TopologyError, match="with one site there is no WAN"):
        topology_from({**alone, "events": events}, "t")
    topology_from({**alone, "events": [{"at_s": 1, "do": "down", "node": "a-1"}]}, "t")


def test_queues_are_sized_for_the_highest_rate_and_longest_rtt_that_events_bring():
    rate = {"at_s": 1, "do": "rate", "site": "a", "up_mbps": 400}
    rtt = {"at_s": 1, "do": "rtt", "pair": ["a", "b"], "rtt_ms": 100}
    plain, faster, longer = (plan_network(topology(*events)) for events in ((), (rate,), (rtt,)))
    assert faster.link("a/up").queue_bytes == 4 * plain.link("a/up").queue_bytes
    assert faster.link("a/down") == plain.link("a/down")
    assert longer.link("a/down").queue_bytes == 5 * plain.link("a/down").queue_bytes


def test_what_netem_would_reorder_goes_to_the_delay_line_unless_netem_is_forced():
    rtt = {"at_s": 1, "do": "rtt", "pair": ["a", "b"], "rtt_ms": 30}
    assert delay_asked(topology()) == "auto"
    assert delay_asked(topology(rtt)) == "nfqueue"
    assert delay_asked(topology(rtt, delay="netem")) == "netem"
    with pytest.raises(TopologyError, match="netem together with jitter_ms"):
        topology({**rtt, "jitter_ms": 2}, delay="netem")


def test_loss_by_an_event_counts_as_loss_from_the_start():
    assert topology({"at_s": 1, "do": "loss", "pair": ["a", "b"], "loss": 0.01}).loses
    assert not topology().loses


def test_a_stored_topology_is_the_same_again_without_its_trace_file(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("t_s,rate_mbps\n0,5\n1,6\n")
    one = topology({"at_s": 1, "do": "trace", "link": "a/up", "file": str(trace)})
    trace.unlink()
    assert topology_from(one.model_dump(mode="json"), "stored") == one
    assert "t.csv (2 points, 5 to 6 Mbit/s)" in describe(one.events[0])


def test_a_restart_to_come_is_known_until_it_has_happened():
    events = [{"at_s": 1, "do": "kill", "node": "a-0"}, {"at_s": 3, "do": "restart", "node": "a-0"}]
    schedule = Schedule(topology(*events).events)
    (kill,) = schedule.due(1)
    assert kill.step.changes == (OnNode("kill", "a-0"),)
    assert schedule.will_restart("a-0")
    assert not schedule.will_restart("a-1")
    list(schedule.due(3))
    assert not schedule.will_restart("a-0")


@given(
    st.lists(
        st.tuples(st.sampled_from(["a/up", "b/down", "c/up"]), st.one_of(st.none(), st.floats(1, 1000))),
        max_size=12,
    )
)
def test_the_last_change_of_a_link_wins_and_the_rest_of_the_plan_stays(changes):
    base = plan_network(topology())
    state = changed(State(base), *(SetRate(link, rate) for link, rate in changes), base=base)
    last = dict(changes)
    for link in base.links:
        rate = last.get(link.name)
        assert state.plan.link(link.name) == (dataclasses.replace(link, rate_mbps=rate) if rate else link)
    assert {d.link: d.rate_mbps for d in state.plan.delays} == {
        f"{site}/down": state.plan.link(f"{site}/down").rate_mbps for site in "abc"
    }


def documented() -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / "events.md").read_text(encoding="utf-8")
    return re.findall(r"^- (\{.*\})$", text, re.MULTILINE)


@pytest.mark.parametrize("line", documented())
def test_every_documented_event_is_correct(line):
    data = load_yaml(SHIPPED / "two-sites-1gbps.yaml")
    whole = topology_from({**data, "events": [yaml.safe_load(line)]}, "t")
    (event,) = whole.events
    assert describe(event)
    schedule = Schedule(whole.events)
    schedule.reached(Progress(1000, 1000), 0.0)
    assert next(schedule.due(1e6)).step.text


def test_every_verb_is_documented_with_an_example():
    shown = {yaml.safe_load(line)["do"] for line in documented()}
    assert shown == set(verbs())
