"""Every test here builds real networks, and must leave the host exactly as it was."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import host


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.netns)


@pytest.fixture(autouse=True)
def host_unchanged():
    """Law 9, asserted around every network test."""
    before = host.snapshot()
    yield
    after = host.snapshot()
    for what, value in before.items():
        assert after[what] == value, f"{what} changed"
