"""Every test here builds real networks, and must leave the host exactly as it was."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import host


def pytest_collection_modifyitems(items):
    """These tests hold real time against real limits on a machine that others may share: one that fails is run twice
    more, each attempt is counted in pytest's last line, and a law that is broken is broken three times."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.netns)
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=2))


@pytest.fixture(autouse=True)
def host_unchanged():
    """Law 9, asserted around every network test."""
    before = host.snapshot()
    yield
    host.stop_what_is_left()
    after = host.snapshot()
    for what, value in before.items():
        assert after[what] == value, f"{what} changed"
