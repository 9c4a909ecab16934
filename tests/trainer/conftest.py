import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fleet import Fleet
from trainings import Runs


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """Ranks that any test may use, one test at a time."""
    fleet = Fleet()
    yield fleet
    fleet.close()


@pytest.fixture(scope="session")
def runs(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Training runs, each distinct configuration once."""
    return Runs(fleet, tmp_path_factory.mktemp("runs"))
