"""Commands that examine published claims."""

import json
from typing import Annotated

import typer
from rich.console import Console

out = Console(highlight=False)


def claim(
    identity: Annotated[str, typer.Argument(metavar="CLAIM", help="its id, e.g. 357x")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """What a published number is a ratio of, and when it holds; by arithmetic so far. Example: dilocox claim 357x"""
    from experiments.claim.page import as_data, examine, page  # noqa: PLC0415
    from experiments.claim.paper import load_claim  # noqa: PLC0415

    loaded = load_claim(identity)
    found = examine(loaded)
    if as_json:
        typer.echo(json.dumps(as_data(loaded, found), indent=2))
    else:
        out.print(page(loaded, found), soft_wrap=False, markup=False)
