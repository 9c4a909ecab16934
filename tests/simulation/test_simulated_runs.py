"""Whole runs against closed forms, where there are closed forms, and against laws where there are none."""

import pytest

from testbed.errors import TestbedError
from testbed.simulation import Conditions, Links, Outage, Pause, Straggler, simulate
from testbed.workload import Workload

RATE_BPS = 1000 * 1448 / 1514 * 1e6 / 8  # payload bytes per second of a gigabit
RTT_S = 0.03
BYTES = 50_000_000


def links(sites=2, rtt_ms=30.0, **options):
    return Links.uniform(sites, rate_mbps=1000, rtt_ms=rtt_ms, **options)


def steps(count, seconds=0.1):
    return {"do": "steps", "count": count, "seconds": seconds, "tokens": 8}


LAUNCH, WAIT = {"do": "launch", "exchange": "x"}, {"do": "wait", "exchange": "x"}


def workload(program, replicas=2, phases=({"message_bytes": BYTES},), **exchange):
    exchanges = {"x": {"phases": list(phases), **exchange}}
    return Workload.model_validate({"replicas": replicas, "exchanges": exchanges, "program": program})


def warm_seconds(message=BYTES, phases=1):
    return phases * (message / RATE_BPS + RTT_S / 2)


def test_an_all_reduce_step_is_compute_and_then_the_exchange():
    """T = B/R + 2(D-1)/D P / W + one way for each phase; the first step is slower by slow start."""
    tuned = ({"message_bytes": BYTES}, {"message_bytes": BYTES})
    once = simulate(workload([{"body": [steps(1), LAUNCH, WAIT]}], phases=tuned), links())
    many = simulate(workload([{"repeat": 11, "body": [steps(1), LAUNCH, WAIT]}], phases=tuned), links())
    assert (many.wall_s - once.wall_s) / 10 == pytest.approx(0.1 + warm_seconds(phases=2))
    assert once.wall_s > 0.1 + warm_seconds(phases=2) + 3 * RTT_S
    assert many.utilisation == pytest.approx(11 * 0.1 / many.wall_s)
    assert many.sent_bytes == 2 * 11 * 2 * BYTES
    assert many.tokens == 2 * 11 * 8


def one_step_late(rounds, local_steps):
    return [
        {"body": [steps(local_steps), LAUNCH]},
        {"repeat": rounds - 1, "body": [steps(local_steps), WAIT, LAUNCH]},
        {"body": [WAIT]},
    ]


def test_one_step_delay_hides_an_exchange_that_is_shorter_than_a_round():
    outcome = simulate(workload(one_step_late(10, 20)), links())
    assert outcome.wall_s == pytest.approx(10 * 2.0 + warm_seconds()), "only the last one shows"
    assert outcome.exposed_comm_s == pytest.approx(warm_seconds())


def test_one_step_delay_shows_what_is_longer_than_a_round():
    outcome = simulate(workload(one_step_late(10, 2)), links())
    hidden = 9 * 0.2
    assert outcome.exposed_comm_s > 9 * warm_seconds() - hidden
    assert outcome.wall_s == pytest.approx(10 * 0.2 + outcome.exposed_comm_s)


def test_members_of_an_all_gather_share_their_downlinks():
    """D - 1 messages into each site at once: (D - 1) c / W, arXiv-free arithmetic."""
    four = workload([{"repeat": 3, "body": [steps(1), LAUNCH, WAIT]}], replicas=4)
    outcome = simulate(four, links(4))
    two_more = simulate(workload([{"repeat": 5, "body": [steps(1), LAUNCH, WAIT]}], replicas=4), links(4))
    assert (two_more.wall_s - outcome.wall_s) / 2 == pytest.approx(0.1 + 3 * BYTES / RATE_BPS + RTT_S / 2)


def test_a_shared_path_halves_what_two_directions_had():
    program = [{"repeat": 3, "body": [steps(1), LAUNCH, WAIT]}]
    more = [{"repeat": 5, "body": [steps(1), LAUNCH, WAIT]}]
    shared = [simulate(workload(p), links(shared=True)).wall_s for p in (program, more)]
    assert (shared[1] - shared[0]) / 2 == pytest.approx(0.1 + 2 * BYTES / RATE_BPS + RTT_S / 2)


def test_a_ring_takes_its_turns_one_after_another():
    ring = ({"pattern": "ring", "message_bytes": 1_000_000, "times": 6},)
    runs = [
        simulate(
            workload([{"repeat": n, "body": [steps(1), LAUNCH, WAIT]}], replicas=4, phases=ring), links(4)
        ).wall_s
        for n in (6, 8)
    ]
    assert (runs[1] - runs[0]) / 2 == pytest.approx(0.1 + 6 * (1_000_000 / RATE_BPS + RTT_S / 2))


def test_a_transport_with_small_chunks_is_bound_by_round_trips_not_by_the_link():
    chunks = ({"message_bytes": BYTES, "window_bytes": 1_650_000},)
    runs = [
        simulate(
            workload([{"repeat": n, "body": [steps(1), LAUNCH, WAIT]}], phases=chunks), links(rtt_ms=100)
        )
        for n in (3, 5)
    ]
    each = (runs[1].exposed_comm_s - runs[0].exposed_comm_s) / 2
    assert each == pytest.approx(BYTES / (1_650_000 / 0.1) + 0.05)


def test_pairs_exchange_with_one_partner_only_and_an_odd_one_waits_for_nobody():
    pair = ({"pattern": "pair", "message_bytes": BYTES},)
    even = simulate(
        workload([{"repeat": 4, "body": [steps(1), LAUNCH, WAIT]}], replicas=4, phases=pair), links(4)
    )
    assert even.sent_bytes == 4 * 4 * BYTES
    odd = simulate(
        workload([{"repeat": 4, "body": [steps(1), LAUNCH, WAIT]}], replicas=3, phases=pair), links(3)
    )
    assert min(r.exposed_comm_s for r in odd.replicas) < max(r.exposed_comm_s for r in odd.replicas)


@pytest.mark.parametrize("local_steps", [1, 20])
@pytest.mark.parametrize("late", [False, True])
def test_repeating_steady_rounds_changes_nothing(late, local_steps):
    together = [{"repeat": 200, "body": [steps(local_steps), LAUNCH, WAIT]}]
    load = workload(one_step_late(200, local_steps) if late else together)
    conditions = Conditions(stragglers=(Straggler(1, 1.3),))
    quick = simulate(load, links(), conditions)
    whole = simulate(load, links(), conditions, repeat_steady=False)
    assert quick.repeated > 150 and whole.repeated == 0
    assert quick.events < whole.events / 5
    assert quick.wall_s == pytest.approx(whole.wall_s, rel=1e-9)
    for a, b in zip(quick.replicas, whole.replicas, strict=True):
        assert a.values() == pytest.approx(b.values(), rel=1e-9)


def test_everybody_waits_for_a_straggler_in_a_synchronous_exchange():
    load = workload([{"repeat": 20, "body": [steps(10), LAUNCH, WAIT]}])
    fast, slow = (simulate(load, links(), Conditions(stragglers=(Straggler(0, p),))) for p in (1.0, 1.5))
    later = slow.wall_s - fast.wall_s
    # the straggler itself finds the others' bytes there, and goes on when its own have left
    assert 20 * (0.5 - RTT_S / 2) <= later <= 20 * 0.5
    assert slow.replicas[1].exposed_comm_s - fast.replicas[1].exposed_comm_s == pytest.approx(later)


def test_an_outage_stops_the_bytes_and_a_failure_stops_the_replica():
    load = workload([{"body": [steps(10), LAUNCH, WAIT, steps(10)]}])
    base = simulate(load, links())
    cut = simulate(load, links(), Conditions(outages=(Outage(link=0, at_s=1.2, for_s=5.0),)))
    assert cut.wall_s == pytest.approx(base.wall_s + 5.0, abs=0.01)  # it comes in the middle of slow start
    died = simulate(load, links(), Conditions(pauses=(Pause(replica=1, at_s=0.5, for_s=7.0),)))
    assert died.wall_s == pytest.approx(base.wall_s + 7.0)


def test_outages_of_one_link_add_up():
    down = Conditions(outages=(Outage(link=0, at_s=0.0, for_s=3.0), Outage(link=0, at_s=2.0, for_s=8.0)))
    load = workload([{"body": [steps(10), LAUNCH, WAIT]}])
    late = simulate(load, links(), Conditions(stragglers=(Straggler(0, 10.0),))).wall_s
    assert simulate(load, links(), down).wall_s == pytest.approx(late, abs=0.02)


def test_jitter_is_drawn_by_seed():
    load = workload([{"repeat": 5, "body": [steps(10), LAUNCH, WAIT]}])
    a, b, c = (simulate(load, links(), Conditions(jitter_sigma=0.1, seed=s)).wall_s for s in (1, 1, 2))
    assert a == b != c


def test_more_replicas_than_sites_are_refused():
    with pytest.raises(TestbedError, match="found 3 replicas, allowed are at most the 2 sites"):
        simulate(workload([{"body": [steps(1)]}], replicas=3), links(2))


def test_law_10_all_links_slowed_together_are_never_faster():
    load = workload(one_step_late(5, 3), phases=({"message_bytes": BYTES}, {"message_bytes": BYTES // 3}))
    walls = [simulate(load, Links.uniform(2, rate, 30)).wall_s for rate in (2000, 1000, 500, 100, 10)]
    assert walls == sorted(walls)
