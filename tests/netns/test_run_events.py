"""Events in whole runs and beside other people's programs: what is said, recorded and kept."""

import json

import host
import pandas as pd
import yaml

from experiments import runner
from experiments.config import resolve_run
from testbed.topology import SHIPPED
from testbed.validation import load_yaml

SMALL = {
    "name": "small",
    "topology": "topologies/two-sites-1gbps.yaml",
    "model": {"preset": "decoder-0.4m"},
    "data": {"source": "pydoc-topics", "seq_len": 64},
    "parallel": {"replicas": 2, "stages": 2, "microbatches": 2},
    "train": {"steps": 60, "batch_size": 4, "lr": 1e-3, "warmup_steps": 2},
    "method": {"name": "diloco", "local_steps": 3},
    "eval": {"every": 1000, "tokens": 1024},
}


def test_a_run_tells_and_records_its_events_and_ends_valid_in_the_state_they_left(tmp_path):
    events = [
        {"at_step": 10, "do": "rtt", "pair": ["north", "south"], "rtt_ms": 50},
        {"at_round": 8, "do": "rate", "site": "north", "rate_mbps": 300},
        {"at_s": 0.5, "do": "freeze", "node": "south-1", "for_s": 0.7},
        {"at_s": 900, "do": "up"},
    ]
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump({**SMALL, "events": events}))
    done = host.dilocox("run", str(run_file), "-o", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "run/record.json").read_text())
    said = record["events"]
    assert said["problems"] == []
    assert said["not_reached"] == ["event 4 (at 900 s: everything up again)"]
    assert [
        one["what"] for one in sorted(said["happened"], key=lambda one: (one["event"], one["asked_s"]))
    ] == [
        "RTT north – south: 50 ms",
        "rate of north/up and north/down: 300 Mbit/s",
        "freeze south-1",
        "thaw south-1",
    ]
    for one in said["happened"]:
        assert f"event {one['event']} at {one['asked_s']:.1f} s: {one['what']} (in effect" in done.stdout
        assert 0 <= one["effect_s"] - one["asked_s"] <= 0.25
    frozen = [one for one in said["happened"] if one["event"] == 3]
    assert frozen[0]["asked_s"] == 0.5
    assert frozen[1]["asked_s"] == 1.2
    after = {(m["source"], m["target"]): m for m in record["links"]["measured"] if m["when"] == "after"}
    assert after["north", "south"]["rtt_wanted_ms"] == 50
    assert after["north", "south"]["rate_wanted_mbps"] == 300
    assert all(m["ok"] for m in after.values())
    assert record["topology"]["events"][0]["at_step"] == 10
    series = pd.read_parquet(tmp_path / "run/events.parquet")
    assert list(series.event) == [one["event"] for one in said["happened"]]
    assert (series.t > said["zero_t"]).all()


def test_a_node_that_an_event_kills_fails_the_run_in_one_sentence_that_names_the_event(tmp_path):
    config = resolve_run({**SMALL, "events": [{"at_step": 5, "do": "kill", "node": "south-1"}]}, "run.yaml")
    record = runner.run(config, tmp_path / "run")
    assert record["status"] == "failed"
    assert record["reason"].startswith(
        "node south-1: killed by event 1 (at step 5: kill south-1); without it node "
    )
    (kill,) = record["events"]["happened"]
    assert kill["effect_s"] - kill["asked_s"] < 0.25
    assert not pd.read_parquet(tmp_path / "run/steps.parquet").empty  # what was measured is kept


def test_exec_and_up_let_events_happen_and_say_so(tmp_path):
    data = load_yaml(SHIPPED / "lan-10g.yaml")
    data["events"] = [
        {"at_s": 0.5, "do": "kill", "node": "hall-0"},
        {"at_s": 0.8, "do": "restart", "node": "hall-0"},
        {"at_s": 1, "do": "kill", "node": "hall-1"},
        {"at_step": 1, "do": "up"},
    ]
    topology = tmp_path / "lan.yaml"
    topology.write_text(yaml.safe_dump(data))
    done = host.dilocox(
        *("exec", str(topology), "--node", "hall-0", "--node", "hall-1"),
        *("--", "sh", "-c", "echo started; sleep 1.5"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hall-0: started") == 2
    assert done.stdout.count("hall-1: started") == 1
    assert "event 2 at 0.8 s: restart hall-0 (in effect" in done.stderr
    assert "hall-1: killed by event 3 (at 1 s: kill hall-1)" in done.stderr
    assert "event 4 (at step 1: everything up again): its time had not come" in done.stderr

    data["events"] = [{"at_s": 0.2, "do": "down", "node": "hall-0", "for_s": 0.3}]
    topology.write_text(yaml.safe_dump(data))
    process = host.start("up", str(topology))
    try:
        lines = []
        while len([line for line in lines if line.startswith("event 1")]) < 2:
            line = process.stdout.readline()
            assert line
            lines.append(line)
        assert "node hall-0 down" in "".join(lines)
        assert "node hall-0 up again" in "".join(lines)
    finally:
        host.stop(process)
        process.stdout.close()
