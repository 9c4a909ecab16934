"""Max-min fairness as its definition says, and flows that take as long as arithmetic does."""

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.simulation.fluid import FluidNetwork, fair_rates
from testbed.simulation.links import Links, Path


@st.composite
def networks(draw):
    links = draw(st.integers(1, 5))
    flows = draw(st.integers(1, 8))
    capacity = [draw(st.floats(0.5, 100)) for _ in range(links)]
    crossings = [
        draw(st.lists(st.integers(0, links - 1), min_size=1, max_size=3, unique=True)) for _ in range(flows)
    ]
    weights = [draw(st.sampled_from([0.5, 1.0, 2.0, 8.0])) for _ in range(flows)]
    caps = [draw(st.one_of(st.just(np.inf), st.floats(0.1, 50))) for _ in range(flows)]
    return capacity, crossings, weights, caps


def rates_of(capacity, crossings, weights, caps):
    filled = [c + [len(capacity)] * (3 - len(c)) for c in crossings]
    return fair_rates(np.array([*capacity, np.inf]), np.array(filled), np.array(weights), np.array(caps))


@settings(max_examples=200, deadline=None)
@given(networks())
def test_rates_are_weighted_max_min_fair(network):
    """No link is over its capacity, no flow over its cap, and each flow is held back by its cap or by a full link
    on which nobody with less to complain about gets more (Bertsekas and Gallager, Data Networks, 6.5.2)."""
    capacity, crossings, weights, caps = network
    rates = rates_of(*network)
    load = [
        sum(r for r, c in zip(rates, crossings, strict=True) if link in c) for link in range(len(capacity))
    ]
    assert all(used <= limit * (1 + 1e-9) for used, limit in zip(load, capacity, strict=True))
    for rate, links, weight, cap in zip(rates, crossings, weights, caps, strict=True):
        assert 0 < rate <= cap * (1 + 1e-9)
        if rate >= cap * (1 - 1e-9):
            continue
        bottlenecks = [
            link
            for link in links
            if load[link] >= capacity[link] * (1 - 1e-9)
            and all(
                rate / weight >= other / w * (1 - 1e-9)
                for other, c, w in zip(rates, crossings, weights, strict=True)
                if link in c
            )
        ]
        assert bottlenecks


def arrivals(links: Links, sends: list[tuple[float, int, int, float]]) -> list[float]:
    """When messages (begin, from, to, bytes) arrive."""
    environment = simpy.Environment()
    network = FluidNetwork(environment, links)
    found = [0.0] * len(sends)

    def one(number, begin, source, target, size):
        yield environment.timeout(begin)
        yield network.send(source, target, size)[1]
        found[number] = environment.now

    for number, send in enumerate(sends):
        environment.process(one(number, *send))
    environment.run()
    return found


def plain(capacity, paths, delay_s=0.0, window=1e12):
    """Links of bytes per second, with no window and (delay 0) no slow start to speak of."""
    named = {key: Path(tuple(links), delay_s, window, 1448) for key, links in paths.items()}
    return Links(tuple(map(str, range(len(capacity)))), tuple(capacity), named)


def test_a_lone_message_takes_its_bytes_over_the_rate_plus_the_way():
    links = plain([100.0], {(0, 1): [0]})
    assert arrivals(links, [(1.0, 0, 1, 250.0)]) == pytest.approx([3.5])


def test_two_messages_share_a_link_and_the_longer_one_speeds_up_when_the_other_is_through():
    links = plain([100.0], {(0, 1): [0], (0, 2): [0]})
    assert arrivals(links, [(0.0, 0, 1, 100.0), (0.0, 0, 2, 300.0)]) == pytest.approx([2.0, 4.0])


def test_a_flow_that_is_held_back_elsewhere_leaves_its_share_to_others():
    links = plain([100.0, 10.0], {(0, 1): [0, 1], (0, 2): [0]})
    assert arrivals(links, [(0.0, 0, 1, 20.0), (0.0, 0, 2, 180.0)]) == pytest.approx([2.0, 2.0])


def test_a_window_limits_a_flow_to_one_window_a_round_trip():
    links = plain([1e6], {(0, 1): [0]}, delay_s=0.05, window=20_000.0)
    first_round_trip = 14_480  # ten segments, then the whole window
    seconds = 0.1 + (1e6 - first_round_trip) / (20_000 / 0.1) + 0.05
    assert arrivals(links, [(0.0, 0, 1, 1e6)]) == pytest.approx([seconds])


def test_slow_start_doubles_each_round_trip_and_happens_once():
    """10 segments, 20, 40, ... a round trip of 0.1 s until 10^7 bytes/s is what the link allows."""
    links = plain([1e7], {(0, 1): [0]}, delay_s=0.05)
    size, window, sent, seconds = 3e6, 14_480.0, 0.0, 0.0
    while window / 0.1 < 1e7:
        sent, seconds, window = sent + window, seconds + 0.1, 2 * window
    cold = seconds + (size - sent) / 1e7 + 0.05
    first, second = arrivals(links, [(0.0, 0, 1, size), (10.0, 0, 1, size)])
    assert first == pytest.approx(cold)
    assert second == pytest.approx(10 + size / 1e7 + 0.05)
    assert cold > 1.5 * (size / 1e7 + 0.05), "the comparison needs a start that matters"


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.integers(0, 2), st.integers(0, 2), st.floats(1e3, 1e6)),
        min_size=1,
        max_size=6,
    ),
    st.floats(1.01, 4),
)
def test_law_10_all_links_slowed_together_are_never_faster(sends, factor):
    sends = [(t, a, b, size) for t, a, b, size in sends if a != b]
    fast = Links.uniform(3, rate_mbps=10, rtt_ms=20)
    slow = Links.uniform(3, rate_mbps=10 / factor, rtt_ms=20)
    if sends:
        last = max(arrivals(fast, sends)), max(arrivals(slow, sends))
        assert last[1] >= last[0] * (1 - 1e-9)
