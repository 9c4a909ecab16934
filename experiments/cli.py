"""The command line ``dilocox``: one noun or verb each; 0 done, 1 the answer is no or a run failed, 2 a wrong request.

Heavy packages are imported by the commands that need them, so that ``--help`` answers at once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from experiments import commands_claim, commands_results
from experiments.errors import RequestError, RunFailure
from testbed.errors import TestbedError, TopologyError

if TYPE_CHECKING:
    from testbed.topology import Topology

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


@app.command()
def doctor() -> None:
    """Try what this machine can do, and print the line that mends what it cannot. Example: dilocox doctor"""
    from testbed.doctor import examine  # noqa: PLC0415

    checks = examine()
    table = Table("check", "result", "detail", box=None)
    for check in checks:
        result = "ok" if check.ok else "MISSING" if check.required else "no"
        table.add_row(check.name, result, check.detail)
    out.print(table)
    broken = [check for check in checks if check.required and not check.ok]
    for check in broken:
        out.print(f"{check.name}: to mend it: {check.mend}", soft_wrap=True)
    if broken:
        raise typer.Exit(1)
    out.print("This machine can build and shape networks.")


@topology_app.command("list")
def topology_list() -> None:
    """The shipped topologies. Example: dilocox topology list"""
    from testbed.topology import SHIPPED, load_topology  # noqa: PLC0415

    table = Table("name", "sites", "nodes", "description", box=None)
    for path in sorted(SHIPPED.glob("*.yaml")):
        topology = load_topology(path)
        table.add_row(topology.name, str(len(topology.sites)), str(len(topology.nodes)), topology.description)
    out.print(table)


@topology_app.command("show")
def topology_show(topology: TopologyArgument) -> None:
    """Sites, nodes, addresses and links of a topology. Example: dilocox topology show two-sites-1gbps"""
    from testbed.events.kinds import describe  # noqa: PLC0415
    from testbed.plan import plan_network  # noqa: PLC0415
    from testbed.topology import load_topology  # noqa: PLC0415
    from testbed.units import goodput_mbps  # noqa: PLC0415

    loaded = load_topology(topology)
    plan = plan_network(loaded)
    out.print(f"{loaded.name}: {loaded.description}", soft_wrap=True)
    out.print(f"source: {loaded.source}", soft_wrap=True)
    nodes = Table("rank", "node", "site", "address", box=None)
    for rank, (node, site) in enumerate(loaded.nodes.items()):
        nodes.add_row(str(rank), node, site, plan.node_address[node])
    out.print(nodes)
    links = Table("link", "Mbit/s (layer 2)", "Mbit/s of TCP payload", "queue kB", box=None)
    for link in plan.links:
        goodput = goodput_mbps(link.rate_mbps, loaded.mtu)
        links.add_row(link.name, f"{link.rate_mbps:g}", f"{goodput:.1f}", f"{link.queue_bytes / 1e3:.0f}")
        if own := link.node_uplink:
            name = link.name.removesuffix("/down") + (
                "/wan-down" if link.name.endswith("/down") else "/wan-up"
            )
            goodput = goodput_mbps(own.rate_mbps, loaded.mtu)
            links.add_row(name, f"{own.rate_mbps:g}", f"{goodput:.1f}", f"{own.queue_bytes / 1e3:.0f}")
    out.print(links)
    for delay in plan.delays:
        text = f"{delay.source} to {delay.target}: {delay.delay_ms:g} ms one way, {2 * delay.delay_ms:g} ms round trip"
        if delay.cap_mbps is not None:
            text += f", at most {delay.cap_mbps:g} Mbit/s"
        if delay.own_class:
            text += f", queue {delay.queue_bytes / 1e3:.0f} kB"
        if delay.mtu is not None:
            text += f", MTU {delay.mtu} bytes"
        out.print(text, soft_wrap=True)
    for number, event in enumerate(loaded.events, start=1):
        out.print(f"event {number}, {describe(event)}", soft_wrap=True, markup=False)


@topology_app.command("check")
def topology_check(topology: TopologyArgument) -> None:
    """Check a topology file without building anything. Example: dilocox topology check my-wan.yaml"""
    from testbed.plan import plan_network  # noqa: PLC0415
    from testbed.topology import load_topology  # noqa: PLC0415

    plan = plan_network(load_topology(topology))
    out.print(
        f"{plan.topology.name}: {len(plan.topology.sites)} sites, {len(plan.node_address)} nodes,"
        f" {len(plan.links)} shaped links, {len(plan.delays)} delays: correct"
    )
    _warn(plan.topology)


@app.command()
def up(
    topology: TopologyArgument,
    shell: Annotated[bool, typer.Option("--shell", help="Mininet's command line in this network")] = False,
    pcap: PcapOption = None,
) -> None:
    """Build a network and keep it until Ctrl-C (or until the shell ends). Example: dilocox up lan-10g --shell"""
    import signal  # noqa: PLC0415

    from experiments.runner import interruptible  # noqa: PLC0415
    from testbed.capture import capturing, check_links  # noqa: PLC0415
    from testbed.events.conductor import Conductor  # noqa: PLC0415
    from testbed.network import Network  # noqa: PLC0415
    from testbed.topology import load_topology  # noqa: PLC0415

    loaded = load_topology(topology)
    check_links(loaded, pcap or [])
    with (
        interruptible(),
        Network(loaded) as network,
        capturing(network, pcap or [], Path.cwd()) as captures,
        Conductor(network, loaded.events, tell=lambda one: out.print(str(one), soft_wrap=True, markup=False)),
    ):
        out.print(f"{network.topology.name} is up; delays by {network.delay}", soft_wrap=True)
        for node, address in network.plan.node_address.items():
            out.print(f"  {node} {address}: mnexec -a {network.nodes[node].pid} COMMAND")
        if shell:
            from testbed.shell import shell as interact  # noqa: PLC0415

            interact(network)
        else:
            out.print("Ctrl-C takes it down.")
            try:
                signal.pause()
            except KeyboardInterrupt:
                out.print("taking it down")
    for capture in captures:
        out.print(capture.sentence(), soft_wrap=True)


@app.command("exec", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def exec_(
    context: typer.Context,
    topology: TopologyArgument,
    node: Annotated[
        list[str] | None, typer.Option("--node", help="only on this node; may be repeated")
    ] = None,
    limit_s: Annotated[float, typer.Option("--limit", help="seconds after which it is ended")] = 3600.0,
    pcap: PcapOption = None,
) -> None:
    """Run a program on every node with the env:// contract. Example: dilocox exec two-sites-1gbps -- hostname -I"""
    from experiments.execute import execute  # noqa: PLC0415
    from testbed.topology import load_topology  # noqa: PLC0415

    command = context.args[1:] if context.args[:1] == ["--"] else context.args
    if command and command[0].startswith("-"):
        raise RequestError(
            f"exec: found the option {command[0]!r}, allowed: --node, --limit, --pcap; the command comes after --"
        )
    if not command:
        raise RequestError("exec: found no command, allowed is: dilocox exec TOPOLOGY -- COMMAND")
    loaded = load_topology(topology)
    unknown = [name for name in node or [] if name not in loaded.nodes]
    if unknown:
        raise RequestError(f"--node: found {unknown[0]!r}, allowed: {', '.join(loaded.nodes)}")
    raise typer.Exit(execute(loaded, command, node or list(loaded.nodes), limit_s, pcap))


@app.command()
def probe(
    topology: TopologyArgument,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Build a network, measure every WAN pair, compare with what was asked. Example: dilocox probe two-sites-1gbps"""
    from experiments.runner import interruptible  # noqa: PLC0415
    from testbed.network import Network  # noqa: PLC0415
    from testbed.probe import probe as measure  # noqa: PLC0415
    from testbed.topology import load_topology  # noqa: PLC0415

    loaded = load_topology(topology)
    _warn(loaded)
    with interruptible(), Network(loaded) as network:
        measured = measure(network)
        delay = network.delay
    if as_json:
        pairs = [pair.row() for pair in measured.pairs]
        links = [link.row() for link in measured.links]
        typer.echo(
            json.dumps(
                {"delay": delay, "seconds": measured.seconds, "pairs": pairs, "links": links}, indent=2
            )
        )
    else:
        heads = ("RTT asked", "measured ms", "payload possible", "Mbit/s", "lost", "ok")
        table = Table(Column("pair", no_wrap=True), *heads, box=None)
        for pair in measured.pairs:
            table.add_row(
                f"{pair.source} to {pair.target}",
                f"{pair.rtt_wanted_ms:g}",
                f"{pair.rtt_ms:.2f}",
                f"{pair.goodput_wanted_mbps:.1f}",
                f"{pair.goodput_mbps:.1f}",
                f"{pair.lost} of {pair.packets}" if pair.packets else "–",
                "no" if pair.problems else "yes",
            )
        out.print(table)
        if measured.links:
            links_table = Table(Column("link", no_wrap=True), "payload possible", "Mbit/s", "ok", box=None)
            for link in measured.links:
                wanted, got = f"{link.goodput_wanted_mbps:.1f}", f"{link.goodput_mbps:.1f}"
                links_table.add_row(link.link, wanted, got, "no" if link.problems else "yes")
            out.print(links_table)
        out.print(f"delays by {delay}; {measured.seconds:.1f} s")
    for problem in measured.problems:
        err.print(problem, soft_wrap=True)
    if measured.problems:
        raise typer.Exit(1)


@app.command()
def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would be removed")] = False,
) -> None:
    """Remove what runs that died left behind, and nothing else. Example: dilocox clean --dry-run"""
    from testbed.cleanup import clean as remove  # noqa: PLC0415
    from testbed.cleanup import leftovers  # noqa: PLC0415

    if os.geteuid() != 0:
        raise TestbedError("cleaning up needs root: sudo dilocox clean")
    found = leftovers() if dry_run else remove()
    for leftover in found:
        verb = "would remove" if dry_run else "removed"
        out.print(
            f"{verb} session {leftover.session.session_id} ({leftover.session.what}):"
            f" {', '.join([f'{len(leftover.processes)} processes and their namespaces', *leftover.remains])}"
        )
    if not found:
        out.print("nothing to remove")


@app.command()
def ps() -> None:
    """The networks that are up on this machine. Example: dilocox ps"""
    from testbed.session import marked_processes, read_sessions  # noqa: PLC0415

    sessions = read_sessions()
    table = Table("session", "what", "owner", "state", "processes", box=None)
    for session in sessions:
        state = "up" if session.alive else "dead: dilocox clean"
        count = str(len(marked_processes(session.session_id)))
        table.add_row(session.session_id, session.what, str(session.owner), state, count)
    out.print(table if sessions else "no network is up")


@app.command()
def top(
    every_s: Annotated[float, typer.Option("--every", min=0.1, help="seconds between two readings")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="one table, then stop")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one reading as JSON, then stop")] = False,
) -> None:
    """Live link rates of the networks that are up, in another terminal. Example: dilocox top --once"""
    from experiments.top import rows, snapshot, table, watch  # noqa: PLC0415

    if not once and not as_json:
        watch(out, every_s)
        return
    found = snapshot(every_s)
    if as_json:
        typer.echo(json.dumps(rows(found), indent=2))
        return
    for network, rates in found:
        out.print(table(network, rates))
    if not found:
        out.print("no network is up")


@app.command()
def down(
    session: Annotated[
        str, typer.Argument(metavar="SESSION", help="its id as `dilocox ps` shows it, or: all")
    ],
) -> None:
    """Take down a network that another terminal holds up. Example: dilocox down all"""
    from testbed.cleanup import down as take_down  # noqa: PLC0415
    from testbed.session import read_sessions  # noqa: PLC0415

    sessions = read_sessions()
    chosen = [s for s in sessions if session in ("all", s.session_id)]
    if not chosen and session != "all":
        known = ", ".join(s.session_id for s in sessions) or "none is up"
        raise RequestError(f"down: found the session {session!r}, allowed: all, or one of: {known}")
    if os.geteuid() != 0:
        raise TestbedError("taking networks down needs root: sudo dilocox down")
    for one in chosen:
        take_down(one)
        out.print(f"session {one.session_id} ({one.what}) is down")
    if not chosen:
        out.print("no network is up")


@topology_app.command("plot")
def topology_plot(
    topology: TopologyArgument,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="PNG, PDF or SVG file")] = None,
) -> None:
    """Draw a topology: sites, links, figures. Example: dilocox topology plot two-sites-1gbps -o wan.png"""
    from experiments.topology_plot import draw  # noqa: PLC0415
    from testbed.topology import load_topology  # noqa: PLC0415

    loaded = load_topology(topology)
    path = output or Path(f"{loaded.name}.png")
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise RequestError(
            f"--output: found {path.name!r}, allowed is a name that ends in .png, .pdf or .svg"
        )
    draw(loaded).savefig(path, dpi=200)
    out.print(str(path), soft_wrap=True)


@app.command()
def run(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml")],
    overrides: SetOption = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="folder of the run")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest whole checkpoint in the folder")
    ] = False,
    pcap: PcapOption = None,
) -> None:
    """Execute one run. Example: dilocox run experiments/runs/dilocox.yaml --set train.steps=20"""
    from experiments.config import check_data, read_mapping, resolve_run  # noqa: PLC0415
    from experiments.overrides import apply_override  # noqa: PLC0415
    from experiments.progress import Reporter  # noqa: PLC0415
    from experiments.runner import run as execute_run  # noqa: PLC0415

    data = read_mapping(run_file)
    for override in overrides or []:
        apply_override(data, override)
    config = resolve_run(data, str(run_file), near=run_file.parent)
    check_data(config)
    if config.topology and not isinstance(config.topology, str):
        _warn(config.topology)
    run_dir = output or Path("runs") / "single" / config.name
    with Reporter(out, config.name) as reporter:
        record = execute_run(config, run_dir, reporter, resume=resume, pcap=pcap or [])
    _print_record(record, run_dir)
    if record["status"] != "done":
        raise typer.Exit(1)


@app.command()
def export(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run that has ended")],
    to: Annotated[str, typer.Option("--to", help="format: hf")] = "hf",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="new folder; default RUN/hf")] = None,
) -> None:
    """Write a run's final weights for transformers. Example: dilocox export runs/single/run --to hf"""
    if to != "hf":
        raise RequestError(f"--to: found {to!r}, allowed: hf")
    from trainer.export import export_to_hf  # noqa: PLC0415
    from trainer.tensor_file import TensorFileError  # noqa: PLC0415

    target = output or run_folder / "hf"
    try:
        config = export_to_hf(run_folder, target)
    except TensorFileError as error:
        raise RequestError(str(error)) from error
    except FileExistsError as error:
        raise RequestError(f"--output: {error}, allowed is a new folder") from error
    out.print(f"{config['architectures'][0]}: {target}", soft_wrap=True)


@app.command()
def sweep(
    sweep_file: Annotated[Path, typer.Argument(metavar="SWEEP.yaml")],
    overrides: SetOption = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="folder of the sweep")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="keep the runs that have finished")] = False,
    retry: Annotated[
        bool, typer.Option("--retry", help="with --resume: redo failed and invalid runs")
    ] = False,
    any_version: Annotated[
        bool, typer.Option("--any-version", help="with --resume: keep runs that other code made")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the runs and stop")] = False,
) -> None:
    """Execute every run of a sweep. Example: dilocox sweep experiments/sweeps/quickstart.yaml"""
    from experiments.sweeping import execute_sweep, plan_sweep  # noqa: PLC0415

    plan = plan_sweep(sweep_file, overrides or [], output)
    if dry_run:
        for planned in plan.runs:
            out.print(planned.run_id)
        return
    if retry and not resume:
        raise RequestError("--retry: found it alone, allowed is --resume --retry")
    failures = execute_sweep(plan, out, resume=resume, retry=retry, any_version=any_version)
    out.print(f"results: {plan.folder}; report: dilocox report {plan.folder}", soft_wrap=True)
    if failures:
        out.print(f"{failures} of {len(plan.runs)} runs are not valid; to redo them: --resume --retry")
        raise typer.Exit(1)


@app.command()
def tune(
    tuning_file: Annotated[Path, typer.Argument(metavar="TUNING.yaml")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="folder of the trials")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="keep the trials that have finished")] = False,
) -> None:
    """Give every method the same number of trials. Example: dilocox tune experiments/tuning/ablation.yaml"""
    from experiments.sweeping import execute_tuning  # noqa: PLC0415
    from experiments.tuning import load_tuning  # noqa: PLC0415

    tuning = load_tuning(tuning_file)
    folder = output or Path("runs") / "tuning" / tuning.name
    table = Table("method", "nats per token (tuning text)", "valid trials", "chosen", box=None)
    for choice in execute_tuning(tuning, tuning_file, folder, out, resume=resume):
        chosen = ", ".join(f"{key}={value}" for key, value in choice.drawn.items())
        table.add_row(choice.label, f"{choice.loss:.4f}", f"{choice.valid} of {choice.trials}", chosen)
    out.print(table)
    out.print(f"chosen settings, for a sweep's list: {folder / 'best.yaml'}", soft_wrap=True)


for reading in (
    commands_results.results,
    commands_results.report,
    commands_results.status,
    commands_claim.claim,
):
    app.command()(reading)


@app.command()
def methods(
    model: Annotated[str, typer.Option(help="a model preset")] = "decoder-1m",
    replicas: Annotated[int, typer.Option(min=1, help="D, the replicas that must agree")] = 2,
    stages: Annotated[int, typer.Option(min=1, help="M, pipeline stages of a replica")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON list")] = False,
) -> None:
    """What every method does and sends, nothing run. Example: dilocox methods --model decoder-4m --replicas 4"""
    from experiments.methods_table import method_rows, table  # noqa: PLC0415

    rows = method_rows(model, replicas, stages)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    out.print(table(rows, out.width))
    out.print(
        f"Payload that a replica of {model} sends to the others ({replicas} in all), mean over replicas;"
        " defaults of the sources.",
        soft_wrap=True,
    )


def _warn(topology: "Topology") -> None:
    """Says what can be built but was probably not meant so."""
    from testbed.suspicions import suspicions  # noqa: PLC0415

    for sentence in suspicions(topology):
        err.print(f"suspicious: {sentence}", soft_wrap=True, markup=False)


def _print_record(record: dict[str, Any], run_dir: Path) -> None:
    totals = record["totals"]
    out.print(
        f"status: {record['status']}" + (f" ({record['reason']})" if record["reason"] else ""), soft_wrap=True
    )
    if totals.get("val_loss") is not None:
        out.print(
            f"validation loss {totals['val_loss']:.4f} nats per token, {totals['tokens_per_s']:.0f} tokens/s,"
            f" {totals['wan_payload_bytes'] / 1e6:.2f} MB of payload between replicas",
            soft_wrap=True,
        )
    for capture in record["captures"]:
        if capture["packets"] is None or capture["lost_packets"]:
            missing = "its end" if capture["packets"] is None else f"{capture['lost_packets']} packets"
            out.print(f"the capture of {capture['link']} lacks {missing}")
    out.print(f"files: {run_dir}", soft_wrap=True)


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
