"""The command line ``dilocox``: one noun or verb each; 0 done, 1 the answer is no or a run failed, 2 a wrong request.

Heavy packages are imported by the commands that need them, so that ``--help`` answers at once.
"""

import subprocess
import sys
from collections.abc import Callable

import typer

from experiments import commands_claim, commands_network, commands_results, commands_runs, commands_topology
from experiments.command_line import err
from experiments.errors import RequestError, RunFailure
from testbed.errors import TestbedError, TopologyError

app = typer.Typer(
    name="dilocox",
    help="Train with DiLoCoX over an emulated WAN whose links are measured, and compare it fairly with AllReduce.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
topology_app = typer.Typer(
    help="Networks: list, show, check. Example: dilocox topology show two-sites-1gbps",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(topology_app, name="topology")

for name in ("list", "show", "check", "plot"):
    topology_app.command(name)(getattr(commands_topology, f"topology_{name}"))
app.command("exec", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    commands_network.exec_
)
COMMANDS: tuple[Callable[..., None], ...] = (
    commands_network.doctor,
    commands_network.up,
    commands_network.probe,
    commands_network.clean,
    commands_network.ps,
    commands_network.top,
    commands_network.down,
    commands_runs.run,
    commands_runs.sweep,
    commands_runs.tune,
    commands_runs.methods,
    commands_runs.export,
    commands_results.results,
    commands_results.report,
    commands_results.status,
    commands_claim.claim,
)
for command in COMMANDS:
    app.command()(command)


def main() -> None:
    """Entry point: every expected error is one sentence, never a traceback."""
    try:
        app()
    except (RequestError, TopologyError) as error:
        err.print(f"dilocox: {error}", soft_wrap=True, markup=False)
        sys.exit(2)
    except (TestbedError, RunFailure) as error:
        err.print(f"dilocox: {error}", soft_wrap=True, markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("dilocox: interrupted; what was measured is kept")
        sys.exit(130)
    except BrokenPipeError:
        sys.stdout = None
        sys.exit(1)
    except (OSError, subprocess.SubprocessError) as error:
        err.print(f"dilocox: {error}", soft_wrap=True, markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
