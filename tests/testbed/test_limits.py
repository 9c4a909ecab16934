import json
from pathlib import Path

import pytest

from experiments.config import resolve_run
from experiments.errors import RequestError
from testbed.errors import TestbedError, TopologyError
from testbed.nodes import cgroups, limits
from testbed.nodes.cgroups import Copy, Enable, Hierarchy, Make, Write
from testbed.nodes.settings import NodeSettings
from testbed.topology import topology_from

BASE = {
    "name": "t",
    "sites": {"north": {"nodes": 2}, "south": {"nodes": 2}},
    "wan": {"uplink": {"rate_mbps": 100}, "pairs": [{"between": ["north", "south"], "rtt_ms": 10}]},
}
RUN = {
    "parallel": {"replicas": 2, "stages": 2, "microbatches": 2},
    "train": {"batch_size": 4, "steps": 2},
    "compute": {"mode": "paced", "step_s": 0.2},
}
V1 = "\n".join(f"cgroup /c/{c} cgroup rw,relatime,{c} 0 0" for c in ("cpu", "cpuset", "memory"))
V2 = "cgroup2 /c cgroup2 rw 0 0"
ALL = NodeSettings(cpus=0.5, cpuset="0-1", memory_mb=300)
SIZE = "299999232"  # 300 MB in whole pages


def topology(nodes):
    return topology_from({**BASE, "nodes": nodes}, "t.yaml")


def test_a_node_takes_what_it_leaves_out_from_its_site_and_then_from_the_default():
    t = topology({"default": {"cpus": 2, "pace": 1}, "north": {"pace": 2}, "north-1": {"cpus": 0.5}})
    assert [(t.settings(n).cpus, t.settings(n).pace) for n in t.nodes] == [(2, 2), (0.5, 2), (2, 1), (2, 1)]


def test_settings_survive_writing_and_reading():
    t = topology({"north-1": {"cpus": 0.5}})
    assert topology_from(t.model_dump(mode="json"), "again") == t


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ({"nort-1": {"cpus": 1}}, "did you mean 'north-1'"),
        ({"north-1": {"cpu": 1}}, "did you mean 'cpus'"),
        ({"north-1": {"cpus": 0.01}}, "nodes.north-1.cpus: found 0.01"),
        ({"north-1": {"memory_mb": 1}}, "nodes.north-1.memory_mb: found 1"),
        ({"north-1": {"cpuset": "3-1"}}, "rising ranges"),
        ({"north-1": {"cpuset": "a"}}, "nodes.north-1.cpuset"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_sentence(nodes, said):
    with pytest.raises(TopologyError, match=said):
        topology(nodes)


def test_a_name_that_means_two_things_is_refused():
    data = {**BASE, "sites": {"north": {"nodes": ["south", "x"]}, "south": {"nodes": 1}}}
    with pytest.raises(TopologyError, match="two things"):
        topology_from({**data, "nodes": {"south": {"cpus": 1}}}, "t")


@pytest.mark.parametrize(
    ("mounts", "unified", "versions"),
    [
        (V1, "", (1, 1, 1)),
        (V1 + "\ncgroup2 /c/unified cgroup2 rw 0 0", "hugetlb", (1, 1, 1)),  # an empty version 2 beside it
        (V2, "cpuset cpu io memory pids", (2, 2, 2)),
        (V1.splitlines()[0] + "\n" + V2, "cpuset memory", (1, 2, 2)),  # hybrid
    ],
)
def test_every_controller_is_found_where_it_is(mounts, unified, versions):
    found = cgroups.hierarchies("proc /proc proc rw 0 0\n" + mounts, lambda _root: unified)
    assert tuple(found[c].version for c in cgroups.CONTROLLERS) == versions


def test_the_steps_on_version_1():
    found = {c: Hierarchy(1, Path("/c", c)) for c in cgroups.CONTROLLERS}
    made = [Path("/c", c, "dilocox-s", *tail) for c in cgroups.CONTROLLERS for tail in ((), ("n",))]
    cpu, cpuset, memory = (Path("/c", c, "dilocox-s", "n") for c in cgroups.CONTROLLERS)
    root, base = Path("/c/cpuset"), Path("/c/cpuset/dilocox-s")
    expected = [Make(folder) for folder in made]
    expected += [Copy(root / f, base / f) for f in ("cpuset.mems", "cpuset.cpus")]
    expected += [Copy(base / f, cpuset / f) for f in ("cpuset.mems", "cpuset.cpus")]
    for folder, file, value, key in (
        (cpu, "cpu.cfs_period_us", "20000", "cpus"),
        (cpu, "cpu.cfs_quota_us", "10000", "cpus"),
        (cpuset, "cpuset.cpus", "0-1", "cpuset"),
        (memory, "memory.limit_in_bytes", SIZE, "memory_mb"),
        (memory, "memory.memsw.limit_in_bytes", SIZE, "memory_mb"),
    ):
        expected.append(Write(folder / file, value, folder / file, key, optional="memsw" in file))
    assert cgroups.plan("s", {"n": ALL}, found) == expected


def test_the_steps_on_version_2():
    found = {c: Hierarchy(2, Path("/c")) for c in cgroups.CONTROLLERS}
    base, node = Path("/c/dilocox-s"), Path("/c/dilocox-s/n")
    assert cgroups.plan("s", {"n": ALL}, found) == [
        Enable(Path("/c"), cgroups.CONTROLLERS),
        Make(base),
        Enable(base, cgroups.CONTROLLERS),
        Make(node),
        Write(node / "cpu.max", "10000 20000", node / "cpu.max", "cpus"),
        Write(node / "cpuset.cpus", "0-1", node / "cpuset.cpus.effective", "cpuset"),
        Write(node / "memory.max", SIZE, node / "memory.max", "memory_mb"),
        Write(node / "memory.swap.max", "0", node / "memory.swap.max", "memory_mb", optional=True),
    ]


def test_a_limit_that_this_machine_cannot_set_is_refused_with_what_to_do():
    with pytest.raises(TestbedError, match="mounted neither as version 1 nor as version 2: mount -t cgroup2"):
        limits.check_possible({"n": NodeSettings(memory_mb=100)}, {})
    everywhere = {c: Hierarchy(2, Path("/c")) for c in cgroups.CONTROLLERS}
    with pytest.raises(TestbedError, match="cpus: found 4000, allowed are at most"):
        limits.check_possible({"n": NodeSettings(cpus=4000)}, everywhere)
    with pytest.raises(TestbedError, match="no processor 9999"):
        limits.check_possible({"n": NodeSettings(cpuset="9999")}, everywhere)


def test_a_limit_that_reads_back_otherwise_is_an_error(tmp_path):
    group = limits.NodeGroup(NodeSettings(memory_mb=300), {"memory": (2, tmp_path)})
    (tmp_path / "memory.max").write_text("max\n")
    with pytest.raises(TestbedError, match=f"memory_mb: '{SIZE}' was set but .* reads 'max'"):
        group.verify("n")
    (tmp_path / "memory.max").write_text(f"{SIZE}\n")
    group.verify("n")


@pytest.mark.parametrize("version", [1, 2])
def test_counters_of_both_versions_are_told_in_the_same_units(tmp_path, version):
    files = {
        1: {"cpu.stat": "nr_periods 9\nnr_throttled 4\nthrottled_time 2500000000\n",
            "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", "memory.max_usage_in_bytes": "3000000\n"},
        2: {"cpu.stat": "usage_usec 1\nnr_throttled 4\nthrottled_usec 2500000\n",
            "memory.events": "oom 2\noom_kill 1\n", "memory.peak": "3000000\n"},
    }[version]  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    group = limits.NodeGroup(ALL, {"cpu": (version, tmp_path), "memory": (version, tmp_path)})
    assert group.usage() == limits.Usage(4, 2.5, 1, 3.0)
    assert "out of memory" in group.out_of_memory("n")


def test_a_damaged_state_file_removes_no_group_of_others(tmp_path):
    session, foreign = tmp_path / "abcd", tmp_path / "dilocox-other"
    session.mkdir(), foreign.mkdir()
    (session / limits.STATE_FILE).write_text(json.dumps({"folders": [str(foreign)], "enabled": []}))
    limits.remove_groups(session)
    assert foreign.is_dir()


def run(**changes):
    return resolve_run({**RUN, "topology": {**BASE, "nodes": {"south": {"pace": 2}}}, **changes}, "run.yaml")


def test_the_pace_of_nodes_becomes_a_factor_for_each_rank_and_stays_when_resolved_again():
    config = run()
    assert config.compute.pace == (1, 1, 2, 2)
    assert resolve_run(config.plain(), "again.yaml") == config


def test_a_pace_without_paced_compute_or_against_the_topology_is_refused():
    with pytest.raises(RequestError, match=r"compute\.mode: found real"):
        run(compute={"mode": "real"})
    with pytest.raises(RequestError, match=r"compute\.pace"):
        run(compute={"mode": "paced", "step_s": 0.2, "pace": [3, 3, 3, 3]})
    with pytest.raises(RequestError, match="one for each of the 4 ranks"):
        run(compute={"mode": "paced", "step_s": 0.2, "pace": [3]})
