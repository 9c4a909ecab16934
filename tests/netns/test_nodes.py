"""Nodes with limits and names of their own, on whichever cgroup version this machine has."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import host
import pytest
import yaml

from testbed.errors import ProgramFailed
from testbed.launch import Program, wait_for_all
from testbed.network import Network
from testbed.nodes import limits
from testbed.topology import topology_from

ONE_SITE = {
    "name": "limited",
    "sites": {"hall": {"nodes": 2}},
    "nodes": {"hall-1": {"cpus": 0.25, "cpuset": "0", "memory_mb": 120}},
}
BUSY = "import time, os; end = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass\nprint(os.times().user)"


def output(network, node, command):
    program = network.nodes[node].start_program(command, network.user, {}, subprocess.PIPE, Path("/"))
    text, _ = program.communicate(timeout=30)
    return text.strip()


def test_a_node_has_its_own_host_name_and_looks_names_up_without_asking_anybody():
    script = """
import socket, time
began = time.monotonic()
print(socket.gethostname(), socket.gethostbyname(socket.gethostname()), socket.getfqdn(), socket.gethostbyaddr('10.1.2.2')[0])
for look_up, name in ((socket.gethostbyname, 'no-such.example'), (socket.gethostbyaddr, '10.9.9.9')):
    try:
        look_up(name)
    except OSError as error:
        print('unknown')
print(time.monotonic() - began)
"""
    before = Path("/proc/sys/kernel/hostname").read_text()
    with Network(topology_from(ONE_SITE, "limited")) as network:
        lines = output(network, "hall-0", [sys.executable, "-c", script]).splitlines()
    assert lines[0].split() == ["hall-0", "10.1.1.2", "hall-0", "hall-1"]
    assert lines[1:3] == ["unknown", "unknown"]
    assert float(lines[3]) < 1
    assert Path("/proc/sys/kernel/hostname").read_text() == before


def test_limits_are_those_of_the_kernel_and_act():
    with Network(topology_from(ONE_SITE, "limited")) as network:
        used = float(output(network, "hall-1", [sys.executable, "-c", BUSY]))
        allowed = output(network, "hall-1", ["grep", "Cpus_allowed_list", "/proc/self/status"])
        free = output(network, "hall-0", ["cat", "/proc/self/cgroup"])
        usage = network.groups["hall-1"].usage()
        row = network.groups["hall-1"].row()
    assert 0.1 < used < 0.6  # a quarter of 1.5 s, and the interpreter's start
    assert usage.throttled_periods > 10
    assert usage.throttled_s > 0
    assert usage.oom_kills == 0
    assert allowed.split() == ["Cpus_allowed_list:", "0"]
    assert "dilocox" not in free
    assert (row["cpus"], row["memory_mb"], set(row["cgroup_version"])) == (
        0.25,
        120,
        {"cpu", "cpuset", "memory"},
    )


def test_out_of_memory_is_reported_as_that_for_the_node_it_happened_in(tmp_path):
    eat = "import time\nhoard = []\nwhile True: hoard.append(bytearray(b'x') * 10_000_000)"
    with Network(topology_from(ONE_SITE, "limited")) as network:
        programs = []
        for node, code in (("hall-0", "import time; time.sleep(60)"), ("hall-1", eat)):
            log = tmp_path / f"{node}.log"
            with log.open("wb") as file:
                process = network.nodes[node].start_program(
                    [sys.executable, "-c", code], network.user, {}, file, Path("/")
                )
            programs.append(Program(node, process, log))
        with pytest.raises(ProgramFailed) as caught:
            wait_for_all(programs, limit_s=60)
        failure = network.explain(caught.value)
    assert failure.node == "hall-1"
    assert "out of memory: the kernel killed it at its limit of 120 MB (nodes.hall-1.memory_mb)" in str(
        failure
    )
    assert failure.log == str(tmp_path / "hall-1.log")


def test_clean_removes_the_groups_of_a_killed_run_and_no_others(tmp_path):
    file = tmp_path / "limited.yaml"
    file.write_text(yaml.safe_dump(ONE_SITE))
    root = limits.find_hierarchies()["memory"].root
    foreign = root / "dilocox-foreign"
    foreign.mkdir()
    try:
        process = host.start("up", str(file))
        assert "is up" in process.stdout.readline()
        made = [p for p in root.glob("dilocox-*") if p != foreign]
        assert made
        host.stop(process, signal.SIGKILL)
        process.stdout.close()
        assert all(p.is_dir() for p in made)
        done = host.dilocox("clean")
        assert done.returncode == 0, done.stderr
        assert "control groups" in done.stdout
        assert not any(p.exists() for p in made)
        assert foreign.is_dir()
    finally:
        foreign.rmdir()


def test_limits_that_cannot_be_set_are_refused_before_anything_is_made(tmp_path):
    file = tmp_path / "limited.yaml"
    file.write_text(yaml.safe_dump({**ONE_SITE, "nodes": {"hall-1": {"cpuset": "9000"}}}))
    began = time.monotonic()
    done = host.dilocox("exec", str(file), "--", "true")
    assert done.returncode == 1
    assert "node hall-1: cpuset: found 9000, but this machine has no processor 9000" in done.stderr
    assert time.monotonic() - began < 20


def test_whoever_runs_out_of_memory_is_told_apart_in_exec_and_in_a_whole_run(tmp_path):
    (tmp_path / "limited.yaml").write_text(yaml.safe_dump(ONE_SITE))
    hog = "import os, sys; os.environ['TESTBED_NODE'] == 'hall-1' and print(len(bytearray(400_000_000)))"
    done = host.dilocox("exec", str(tmp_path / "limited.yaml"), "--", sys.executable, "-c", hog)
    assert done.returncode == 137
    assert "hall-1: out of memory: the kernel killed it at its limit of 120 MB" in done.stderr
    run = {
        "topology": ONE_SITE,
        "parallel": {"replicas": 1, "stages": 2, "microbatches": 2},
        "train": {"steps": 4, "batch_size": 4},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    done = host.dilocox("run", str(tmp_path / "run.yaml"), "-o", str(tmp_path / "run"))
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert (
        "status: failed" in said
        and "hall-1" in said
        and "out of memory" in said
        and "nodes.hall-1.memory_mb" in said
    )
    assert (tmp_path / "run/record.json").is_file(), "what was measured is kept"
