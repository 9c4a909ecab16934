"""Figures beside their targets."""

from rich.console import Console
from rich.table import Table


class Verdicts:
    """A table that says of each figure what was asked for, what came out, and whether that is enough."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, str, str, str]] = []

    def at_least(self, what: str, target: float, measured: float, unit: str, rival: str = "") -> None:
        """A figure that must reach its target."""
        self._add(what, f">= {target:.4g} {unit}", f"{measured:.4g} {unit}", measured >= target, rival)

    def at_most(self, what: str, target: float, measured: float, unit: str, rival: str = "") -> None:
        """A figure that must stay below its target."""
        self._add(what, f"<= {target:.4g} {unit}", f"{measured:.4g} {unit}", measured <= target, rival)

    def _add(self, what: str, target: str, measured: str, enough: bool, rival: str) -> None:
        self._rows.append((what, target, measured, "PASS" if enough else "FAIL", rival))

    def show(self, console: Console, rival: str = "rival") -> None:
        """Prints the table."""
        table = Table("figure", "target", "measured", "", rival, box=None)
        for row in self._rows:
            table.add_row(*row)
        console.print(table)
