"""Commands that build, measure, watch and remove networks."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from experiments.command_line import PcapOption, TopologyArgument, err, out, warn
from experiments.errors import RequestError
from testbed.errors import TestbedError


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
        try:
            out.print(f"{network.topology.name} is up; delays by {network.delay}", soft_wrap=True)
            for node, address in network.plan.node_address.items():
                out.print(f"  {node} {address}: mnexec -a {network.nodes[node].pid} COMMAND")
            if shell:
                from testbed.shell import shell as interact  # noqa: PLC0415

                interact(network)
            else:
                out.print("Ctrl-C takes it down.")
                signal.pause()
        except KeyboardInterrupt:  # also one that comes while the lines above are printed
            out.print("taking it down")
    for capture in captures:
        out.print(capture.sentence(), soft_wrap=True)


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
    warn(loaded)
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
