"""What the commands share: consoles, and arguments that several of them take."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from testbed.topology import Topology

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

TopologyArgument = Annotated[str, typer.Argument(metavar="TOPOLOGY", help="a YAML file, or a shipped name")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a key, e.g. train.steps=20")
]
PcapOption = Annotated[
    list[str] | None,
    typer.Option("--pcap", metavar="LINK", help="capture the packets of this link; may be repeated"),
]


def warn(topology: "Topology") -> None:
    """Says what can be built but was probably not meant so."""
    from testbed.suspicions import suspicions  # noqa: PLC0415

    for sentence in suspicions(topology):
        err.print(f"suspicious: {sentence}", soft_wrap=True, markup=False)
