"""Other people's programs over emulated links, by the very commands that docs/running-programs.md shows."""

import importlib.util
import platform
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import host
import pytest
import torch

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "running-programs.md"
EXAMPLES = PROJECT / "docs" / "examples"


def run_documented(script: str) -> subprocess.CompletedProcess:
    """Runs the one command of the page that names a script; sudo is dropped, the interpreter is the tests' own."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if script in line]
    (command,) = (line for line in lines if line.startswith("sudo "))
    words = shlex.split(command.removeprefix("sudo .venv/bin/dilocox "))
    folder = str(Path(sys.executable).parent)
    return host.dilocox(*(word.replace(".venv/bin", folder) for word in words))


def need(package: str) -> None:
    """Skips only where the package has no wheel; anywhere else `make setup` has installed it."""
    if importlib.util.find_spec(package):
        return
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip(f"{package} has no wheel for {sys.platform} on {platform.machine()}")
    pytest.fail(f"{package} is not installed: make setup")


def test_iperf3_serves_on_one_node_and_sends_from_another():
    done = run_documented("iperf3.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    received = re.search(r"^south-0: .* ([\d.]+) Mbits/sec +receiver$", done.stdout, re.M)
    assert received, done.stdout
    assert 0.5 * 956 < float(received[1]) < 957  # its slow start is in it
    assert "north-0: Accepted connection from 10.2.1.2" in done.stdout


def test_torchrun_forms_one_job_across_the_nodes():
    done = run_documented("allreduce.py")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, node in enumerate(("north-0", "north-1", "south-0", "south-1")):
        assert f"{node}: rank {rank} of 4 on {node}: sum 10," in done.stdout


def test_hivemind_peers_find_each_other_and_average():
    need("hivemind")
    done = run_documented("hivemind_average.py")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, node in enumerate(("north-0", "south-0")):
        assert f"{node}: rank {rank}: mean 0.5 over 2 peers, right\n" in done.stdout


def test_torchfts_diloco_over_two_nodes_ends_where_the_same_replicas_in_one_process_end():
    need("torchft")
    done = run_documented("torchft_diloco.py")
    assert done.returncode == 0, done.stdout + done.stderr
    sums = re.findall(
        r"replica (\d) of 2: 3 outer steps, loss [\d.]+, outer parameters (-?[\d.]+)", done.stdout
    )
    assert sorted(rank for rank, _ in sums) == ["0", "1"], done.stdout
    assert sums[0][1] == sums[1][1]
    assert float(sums[0][1]) == pytest.approx(_in_one_process(), rel=1e-5)


def _in_one_process() -> float:
    """DiLoCo by its definition: inner steps from common parameters, an outer step on the mean of what they moved by."""
    spec = importlib.util.spec_from_file_location("torchft_diloco", EXAMPLES / "torchft_diloco.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    net = example.model()
    outer = torch.optim.SGD(net.parameters(), **example.OUTER)
    replicas = [example.model() for _ in range(2)]
    inner = [example.inner_optimiser(replica) for replica in replicas]
    for outer_step in range(example.OUTER_STEPS):
        for rank, replica in enumerate(replicas):
            replica.load_state_dict(net.state_dict())
            for k in range(example.LOCAL_STEPS):
                inner[rank].zero_grad()
                example.loss_of(replica, rank, outer_step * example.LOCAL_STEPS + k).backward()
                inner[rank].step()
        for common, *own in zip(net.parameters(), *(r.parameters() for r in replicas), strict=True):
            common.grad = common.detach() - torch.stack([p.detach() for p in own]).mean(0)
        outer.step()
    return example.checksum(net)


def test_named_nodes_alone_are_ranked_and_the_first_of_them_leads():
    done = host.dilocox(
        "exec", "lan-10g", "--node", "hall-3", "--node", "hall-1", "--", "sh", "-c",
        "echo $RANK/$WORLD_SIZE $MASTER_ADDR",
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == ["hall-1: 0/2 10.1.2.2", "hall-3: 1/2 10.1.2.2"]


def test_the_commands_own_double_dash_is_kept_and_a_misspelt_option_is_refused():
    kept = host.dilocox("exec", "lan-10g", "--node", "hall-0", "--", "printf", "%s,", "a", "--", "b")
    assert kept.stdout == "hall-0: a,--,b,\n"
    refused = host.dilocox("exec", "lan-10g", "--nodes", "hall-0", "--", "true")
    assert refused.returncode == 2
    assert "found the option '--nodes', allowed: --node" in refused.stderr


def test_a_program_that_a_signal_ends_counts_as_128_and_the_signal():
    done = host.dilocox("exec", "lan-10g", "--node", "hall-0", "--", "sh", "-c", "kill -15 $$")
    assert done.returncode == 128 + 15
    assert "hall-0: killed by signal 15" in done.stderr


def test_what_a_program_says_is_seen_while_it_runs():
    script = "import time; print('here'); time.sleep(60)"
    process = host.start("exec", "lan-10g", "--node", "hall-0", "--", sys.executable, "-c", script)
    began = time.monotonic()
    assert process.stdout.readline() == "hall-0: here\n"
    assert host.stop(process) < 5
    process.stdout.close()
    assert time.monotonic() - began < 30
