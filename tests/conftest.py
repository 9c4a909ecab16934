"""What every test may rely on."""

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Numbers that are meant to change are written anew, and reviewed as a difference."""
    parser.addoption("--rewrite-golden", action="store_true", help="write tests/trainer/golden anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Network tests need root; in CI they must run, elsewhere they are skipped with the reason."""
    if os.geteuid() == 0 or os.environ.get("CI") == "true":
        return
    skip = pytest.mark.skip(reason="makes network namespaces: needs root (sudo make test)")
    for item in items:
        if "netns" in item.keywords:
            item.add_marker(skip)
