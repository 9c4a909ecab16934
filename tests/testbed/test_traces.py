from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import TopologyError
from testbed.events.traces import (
    check_points,
    from_csv,
    from_mahimahi,
    length_s,
    play,
    read_trace,
    shapeable_mbps,
)

FRAME_MBIT = 1514 * 8e-6


def test_a_csv_is_read_with_its_columns_in_any_order():
    assert from_csv("rate_mbps, note, t_s\n10,x,0\n2.5,y,1.5\n") == [(0.0, 10.0), (1.5, 2.5)]


def test_one_opportunity_a_millisecond_is_a_full_packet_a_millisecond():
    points = from_mahimahi([str(ms) for ms in range(1, 1001)], bin_s=0.1)
    assert [t for t, _ in points] == pytest.approx([k / 10 for k in range(10)])
    assert sum(rate * 0.1 for _, rate in points) == pytest.approx(1000 * FRAME_MBIT)
    assert points[5][1] == pytest.approx(FRAME_MBIT / 1e-3)  # 12.112 Mbit/s at layer 2: Mahimahi's "12 Mbps"


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=400).map(sorted).filter(lambda t: t[-1] > 0),
    st.sampled_from([0.05, 0.1, 0.5]),
)
def test_every_opportunity_of_a_mahimahi_trace_is_in_exactly_one_bin(times, bin_s):
    points = from_mahimahi([str(t) for t in times], bin_s)
    bin_ms = round(bin_s * 1e3)
    opportunities = 0.0
    for k, (t, rate) in enumerate(points):
        assert t == pytest.approx(k * bin_s)
        width_ms = min(bin_ms, times[-1] - k * bin_ms)
        opportunities += rate * width_ms * 1e-3 / FRAME_MBIT
    left_out = times[-1] % bin_ms
    if len(points) * bin_ms >= times[-1]:
        assert opportunities == pytest.approx(len(times))
    else:  # only a sliver of less than half a bin at the end may be left out
        assert left_out < bin_ms / 2
        assert opportunities == pytest.approx(sum(t < len(points) * bin_ms for t in times))


@given(st.lists(st.tuples(st.floats(0.02, 100), st.floats(0, 1e5, allow_nan=False)), min_size=1, max_size=30))
def test_a_csv_of_any_points_is_read_as_it_was_written(gaps):
    points, t = [], 0.0
    for gap, rate in gaps:
        points.append((t, rate))
        t += gap
    text = "t_s,rate_mbps\n" + "".join(f"{t!r},{rate!r}\n" for t, rate in points)
    assert from_csv(text) == points
    check_points(points)


@given(st.lists(st.floats(0.02, 10), min_size=1, max_size=10), st.integers(2, 4), st.floats(0.1, 1000))
def test_a_loop_repeats_the_rates_with_the_same_distances_and_time_never_goes_back(gaps, passes, rate):
    points = [(sum(gaps[:k]), rate + k) for k in range(len(gaps) + 1)]
    played = play(points, loop=True)
    found = [next(played) for _ in range(passes * len(points))]
    times = [t for t, _ in found]
    assert times == sorted(times)
    for k in range(passes):
        part = found[k * len(points) : (k + 1) * len(points)]
        assert [r for _, r in part] == [shapeable_mbps(r) for _, r in points]
        assert [t - part[0][0] for t, _ in part] == pytest.approx([t for t, _ in points], abs=1e-6)
    assert found[len(points)][0] == pytest.approx(length_s(points))


def test_without_a_loop_a_trace_ends():
    assert list(play([(0.0, 5.0), (1.0, 6.0)], loop=False)) == [(0.0, 5.0), (1.0, 6.0)]


def test_silence_lets_one_frame_in_a_tenth_of_a_second_through():
    assert shapeable_mbps(0.0) == pytest.approx(FRAME_MBIT / 0.1)
    assert shapeable_mbps(50.0) == 50.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "found nothing in it"),
        ("time,rate\n0,1\n", "found the columns time, rate; allowed is a CSV with t_s and rate_mbps"),
        ("t_s,rate_mbps\n0,fast\n", "line 2: found ['0', 'fast'], allowed are two numbers"),
        ("t_s,rate_mbps\n0,1\n0,2\n", "point 2: found t_s 0 after 0"),
        ("t_s,rate_mbps\n0,-1\n", "point 1: found -1.0 Mbit/s"),
        ("t_s,rate_mbps\n0,nan\n", "point 1: found nan Mbit/s"),
        ("t_s,rate_mbps\n0\n", "line 2: found ['0', None]"),
        ("t_s,rate_mbps\n", "allowed are 1 to"),
        ("5\n4\n", "line 2: found 4 after 5"),
        ("5\nx\n", "line 2: found 'x', allowed is a whole number of milliseconds"),
        ("0\n", "found only the millisecond 0"),
    ],
)
def test_a_trace_that_cannot_be_read_is_one_sentence(tmp_path: Path, text, said):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TopologyError) as caught:
        read_trace(path, 0.1)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
