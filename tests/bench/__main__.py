"""``make bench``: what the testbed reaches here, each figure beside a named rival measured in the same run.

Figures are medians; the machine is named first. Where a target exists the table says whether it was reached.
"""

import sys
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
import exchange
import links
import overlap
import startup
import training

from experiments.record import environment

SECTIONS = {
    "links": links.run,
    "startup": startup.run,
    "exchange": exchange.run,
    "overlap": overlap.run,
    "training": training.run,
}


def main() -> None:
    """Runs the sections named on the command line, or all."""
    console = Console(highlight=False, width=110)
    machine = environment()
    console.print(
        f"machine: {machine['machine']['cpu']}, {machine['machine']['cores']} cores,"
        f" {machine['machine']['memory_gib']} GiB, kernel {machine['kernel']}; commit {machine['commit']}"
        f"{' (dirty)' if machine['dirty'] else ''}"
    )
    unknown = [name for name in sys.argv[1:] if name not in SECTIONS]
    if unknown:
        sys.exit(f"bench: found {unknown[0]!r}, allowed: {', '.join(SECTIONS)}")
    for name in sys.argv[1:] or SECTIONS:
        console.rule(name)
        SECTIONS[name](console)


if __name__ == "__main__":
    main()
