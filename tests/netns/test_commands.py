import json
import signal
import subprocess
import time
from pathlib import Path

import host
import pytest


def test_doctor_says_that_this_machine_is_usable():
    done = host.dilocox("doctor")
    assert done.returncode == 0, done.stdout
    assert "MISSING" not in done.stdout


def test_doctor_names_what_is_missing_and_the_line_that_mends_it(tmp_path):
    done = subprocess.run(
        [*host.DILOCOX, "doctor"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "apt-get install mininet" in done.stdout


def test_a_command_that_needs_missing_tools_says_so_and_ends_with_1(tmp_path):
    done = subprocess.run(
        [*host.DILOCOX, "probe", "two-sites-1gbps"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "mnexec is missing: apt-get install" in done.stderr
    assert "Traceback" not in done.stderr


# Root loads everything first, for nobody may be unable to reach an interpreter below /root.
WITHOUT_ROOT = """
import os, sys
import experiments.cli, experiments.progress, experiments.runner, pydoc_data.topics, trainer.data
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.argv = ["dilocox", *sys.argv[1:]]
experiments.cli.main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["probe", "two-sites-1gbps"],
        ["up", "lan-10g"],
        ["exec", "lan-10g", "--", "true"],
        ["clean"],
        ["run", "experiments/runs/dilocox.yaml", "-o", "OUT"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_network_commands_without_root_say_so_end_with_1_and_leave_nothing(tmp_path, arguments):
    tmp_path.chmod(0o777)
    arguments = [str(tmp_path / "out") if word == "OUT" else word for word in arguments]
    done = subprocess.run(
        [host.DILOCOX[0], "-c", WITHOUT_ROOT, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "needs root" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "out").exists()


def test_exec_runs_everywhere_with_the_contract_and_returns_the_worst_status():
    script = "echo $TESTBED_NODE $TESTBED_SITE $RANK/$WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $GLOO_SOCKET_IFNAME; [ $RANK != 2 ] || exit 7"
    done = host.dilocox("exec", "two-sites-1gbps", "--", "sh", "-c", script)
    assert done.returncode == 7
    for rank, node in enumerate(("north-0", "north-1", "south-0", "south-1")):
        assert f"{node}: {node} {node[:5]} {rank}/4 10.1.1.2:29500 eth0\n" in done.stdout
    assert "south-0: exited with status 7" in done.stderr


def test_exec_on_named_nodes_only_and_unknown_ones_are_refused():
    done = host.dilocox("exec", "lan-10g", "--node", "hall-3", "--", "hostname", "-I")
    assert (done.returncode, done.stdout.split()) == (0, ["hall-3:", "10.1.4.2"])
    refused = host.dilocox("exec", "lan-10g", "--node", "hall-9", "--", "true")
    assert refused.returncode == 2
    assert "found 'hall-9', allowed: hall-0" in refused.stderr


def test_exec_ends_a_program_that_overruns_its_limit():
    began = time.monotonic()
    done = host.dilocox("exec", "lan-10g", "--limit", "1", "--", "sleep", "100")
    assert done.returncode == 124
    assert time.monotonic() - began < 15


def test_probe_prints_what_was_asked_and_measured():
    done = host.dilocox("probe", "two-sites-1gbps", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert all(pair["ok"] for pair in result["pairs"])
    assert len(result["pairs"]) == 2


def test_up_shell_is_minninets_command_line():
    process = subprocess.run(
        [*host.DILOCOX, "up", "two-sites-1gbps", "--shell"],
        input="north-0 ping -c 1 -W 2 south-1\nexit\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "1 received" in process.stdout + process.stderr


def test_up_stays_until_it_is_told_to_go():
    process = host.start("up", "two-sites-1gbps")
    line = process.stdout.readline()
    assert "is up" in line
    assert host.stop(process, signal.SIGTERM) < 5
    process.stdout.close()


def test_ps_shows_what_is_up_and_down_takes_it_down():
    process = host.start("up", "lan-10g")
    assert "is up" in process.stdout.readline()
    shown = host.dilocox("ps").stdout
    assert "network lan-10g" in shown
    session = next(line.split()[0] for line in shown.splitlines() if "network lan-10g" in line)
    refused = host.dilocox("down", "no-such-session")
    assert (refused.returncode, session in refused.stderr) == (2, True)
    done = host.dilocox("down", session)
    assert done.returncode == 0, done.stderr
    process.wait(timeout=5)
    process.stdout.close()
    assert "no network is up" in host.dilocox("ps").stdout
