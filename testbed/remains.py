"""What a session registers beside its processes, and how that goes: control groups and containers."""

from pathlib import Path

from testbed.nodes import limits


def remains(session_folder: Path) -> list[str]:
    """What there is to remove, in words."""
    groups = limits.registered(session_folder)
    return [f"{len(groups)} control groups"] if groups else []


def remove_remains(session_folder: Path) -> None:
    """Removes what a session's folder registers, after its processes are dead.

    Raises:
        TestbedError: something does not go; the folder must stay then, so that a later try knows of it.
    """
    limits.remove_groups(session_folder)
