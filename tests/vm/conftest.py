"""Boots the virtual machine once; every test here judges what was measured in it."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import machine

LIMIT_S = 420
INSTALL_S = 600


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vm)
            item.add_marker(pytest.mark.timeout(INSTALL_S + LIMIT_S + 120))


@pytest.fixture(scope="session")
def facts(tmp_path_factory) -> dict[str, Any]:
    """What inside.py measured; skipped with a reason where there can be no virtual machine, failed in CI."""
    if reason := machine.why_not():
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    results = tmp_path_factory.mktemp("vm")
    try:
        seconds = machine.boot(Path(__file__).parent / "inside.py", results, LIMIT_S)
    except machine.VmError as error:
        # what was measured before the end is judged; the rest fails with the reason
        if not (results / "facts.json").exists():
            pytest.fail(str(error))
        return {**json.loads((results / "facts.json").read_text(encoding="utf-8")), "error": str(error)}
    return {**json.loads((results / "facts.json").read_text(encoding="utf-8")), "seconds": seconds}
