"""The delay line's own order of things, without a kernel."""

import random
import socket
import threading
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import TestbedError
from testbed.shaping.control import DelayControl, Obedience
from testbed.shaping.delayline import DelayLine


def line(delay_s: float) -> DelayLine:
    """One that has no queue in the kernel."""
    made = DelayLine.__new__(DelayLine)
    made.paths = {0: (delay_s, 0.0, 0.0)}
    made.waiting = {0: deque()}
    made.random = random.Random(0)
    made.lost = 0
    return made


happenings = st.lists(
    st.tuples(
        st.floats(0, 0.01),  # seconds since the packet before
        st.one_of(st.none(), st.tuples(st.floats(0.02, 0.5), st.floats(0, 0.02))),  # other delay and jitter
        st.integers(0, 5),  # packets that have left meanwhile
    ),
    min_size=1,
    max_size=60,
)


@given(happenings)
def test_no_change_of_delay_or_jitter_lets_a_packet_overtake_and_none_is_lost(happened):
    one = line(0.1)
    now, left, arrived_at, delays = 0.0, [], [], []
    for number, (gap, change, leaving) in enumerate(happened):
        now += gap
        if change:
            one.paths[0] = (*change, 0.0)
        one._hold(0, number, now)
        arrived_at.append(now)
        delays.append(one.paths[0])
        for _ in range(min(leaving, len(one.waiting[0]) - 1)):
            left.append(one.waiting[0].popleft())
    left += one.waiting[0]
    assert [packet for _, packet in left] == list(range(len(happened)))
    dues = [due for due, _ in left]
    assert dues == sorted(dues)
    for due, arrived, (delay, jitter, _) in zip(dues, arrived_at, delays, strict=True):
        assert due >= arrived + delay - jitter - 1e-9


def test_a_running_line_takes_other_figures_over_says_so_and_how_long_the_old_ones_last():
    import time  # noqa: PLC0415

    control = DelayControl()
    paths = {0: (0.1, 0.0, 0.0), 1: (0.02, 0.0, 0.0)}
    theirs = Obedience(control.theirs, paths)
    thread = threading.Thread(target=lambda: _answer(theirs, {0: time.monotonic() + 0.09}))
    thread.start()
    answer = control.set({0: (30.0, 2.0, 0.25)})
    thread.join(timeout=5)
    assert paths == {0: (0.03, 0.002, 0.25), 1: (0.02, 0.0, 0.0)}
    assert answer.settles_s == pytest.approx(0.06, abs=0.02)
    control.close()


def test_figures_that_were_not_taken_over_are_an_error_and_so_is_silence():
    control = DelayControl()
    theirs = Obedience(control.theirs, {0: (0.1, 0.0, 0.0)})
    thread = threading.Thread(target=lambda: _answer(theirs, {}))
    thread.start()
    with pytest.raises(TestbedError, match=r"asked for .* in queue 7 and has None"):
        control.set({7: (30.0, 0.0, 0.0)})
    thread.join(timeout=5)
    control.started()
    with pytest.raises(TestbedError, match="the delay line does not answer"):
        control.set({0: (30.0, 0.0, 0.0)})
    control.close()


def test_a_line_whose_network_is_gone_stops_asking_and_goes_on():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    obedience = Obedience(theirs, {0: (0.1, 0.0, 0.0)})
    assert obedience.obey({})  # nothing was asked
    ours.close()
    assert not obedience.obey({})
    theirs.close()


def _answer(theirs: Obedience, last_due: dict[int, float]) -> None:
    theirs.sock.settimeout(5)
    theirs.obey(last_due)
