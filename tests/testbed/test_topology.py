import copy
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import TopologyError
from testbed.topology import SHIPPED, json_schema, load_topology, topology_from
from testbed.units import goodput_mbps, parse_rate_mbps

TWO = {
    "name": "t",
    "sites": {"a": {"nodes": 2}, "b": {"nodes": 1}},
    "wan": {"uplink": {"rate_mbps": 100}, "pairs": [{"between": ["a", "b"], "rtt_ms": 20}]},
}


def changed(path: str, value: object) -> dict:
    data = copy.deepcopy(TWO)
    node = data
    *parents, last = path.split(".")
    for parent in parents:
        node = node[int(parent)] if isinstance(node, list) else node.setdefault(parent, {})
    node[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("wan.uplink.rate_mbps", -5, "wan.uplink.rate_mbps: found -5"),
        ("wan.uplink.rate_mbps", 0, "allowed is a rate"),
        ("wan.uplink.rate_mbps", "fast", "found 'fast'"),
        ("wan.uplink.rate_mbps", "1 Gbyte", "allowed is a rate"),
        ("wan.uplink.rate_mbps", 1e9, "allowed is a rate"),
        ("wan.uplink.rate_mbps", True, "allowed is a rate"),
        ("wan.uplink.rate", 5, "did you mean 'rate_mbps'"),
        ("wan.uplink.up_mbps", 5, "either rate_mbps, or up_mbps and down_mbps"),
        ("wan.pairs.0.rtt_ms", -1, "wan.pairs.0.rtt_ms: found -1"),
        ("wan.pairs.0.jitter_ms", 11, "at most half of rtt_ms (10)"),
        ("wan.pairs.0.loss", 1.5, "wan.pairs.0.loss: found 1.5"),
        ("wan.pairs.0.loss", -0.1, "wan.pairs.0.loss: found -0.1"),
        ("wan.pairs.0.rtt", 5, "did you mean 'rtt_ms'"),
        ("wan.pairs.0.between", ["a", "c"], "unknown site 'c'"),
        ("wan.pairs.0.between", ["a", "a"], "two different sites"),
        ("wan.pairs", [], "no entry for a and b"),
        ("sites.a.nodes", 0, "1 to 200 nodes"),
        ("sites.a.nodes", ["b-0"], "each name once"),
        ("sites.a.nodes", ["x", "x"], "each name once"),
        ("sites.a.nodes", ["X Y"], "allowed in a node's name"),
        ("sites.a.lan", {"rtt_ms": 50}, "sites.a.lan.rtt_ms"),
        ("tcp.congestion_control", "vegas", "tcp.congestion_control: found 'vegas'"),
        ("delay", "magic", "delay: found 'magic'"),
        ("nmae", "x", "did you mean 'name'"),
    ],
)
def test_a_wrong_key_or_value_is_one_sentence_that_names_it(path, value, said):
    with pytest.raises(TopologyError) as caught:
        topology_from(changed(path, value), "wan.yaml")
    message = str(caught.value)
    assert said in message
    assert message.startswith("wan.yaml: ")
    assert "\n" not in message


def test_jitter_that_would_reorder_packets_is_refused_with_netem():
    data = changed("delay", "netem")
    data["wan"]["pairs"][0]["jitter_ms"] = 1
    with pytest.raises(TopologyError, match="allowed: auto, nfqueue"):
        topology_from(data, "wan.yaml")


def test_two_equal_keys_in_a_file_are_refused_not_merged(tmp_path: Path):
    file = tmp_path / "t.yaml"
    file.write_text("name: t\nsites:\n  a: {nodes: 1}\n  a: {nodes: 2}\n")
    with pytest.raises(TopologyError, match="line 4: key 'a' found twice"):
        load_topology(file)


@pytest.mark.parametrize("text", ["", "- 1\n", "a: [", "\x00"])
def test_files_that_are_no_mapping_are_refused_in_one_sentence(tmp_path: Path, text: str):
    file = tmp_path / "t.yaml"
    file.write_text(text)
    with pytest.raises(TopologyError) as caught:
        load_topology(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_topology_names_the_shipped_ones():
    with pytest.raises(TopologyError, match="two-sites-1gbps"):
        load_topology("no-such-thing")


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_topology_is_correct_named_as_its_file_and_has_a_source(path: Path):
    topology = load_topology(path)
    assert topology.name == path.stem
    assert topology.source
    assert topology.description


def test_the_json_schema_for_editors_is_that_of_the_code():
    written = json.loads((SHIPPED / "schema.json").read_text())
    assert written == json_schema(), "write it anew: python -m testbed.topology > topologies/schema.json"


def test_rates_are_read_strictly():
    assert parse_rate_mbps("1Gbit") == parse_rate_mbps(1000) == parse_rate_mbps("1000 Mbit/s") == 1000.0
    assert parse_rate_mbps("56kbit") == pytest.approx(0.056)
    assert goodput_mbps(1000) == pytest.approx(956.4, abs=0.01)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.floats(0.01, 10_000),
    st.floats(0, 500),
)
def test_nodes_are_in_site_order_and_every_pair_has_its_rtt(counts, rate, rtt):
    sites = {f"s{i}": {"nodes": count} for i, count in enumerate(counts)}
    pairs = [{"between": list(p), "rtt_ms": rtt + i} for i, p in enumerate(itertools.combinations(sites, 2))]
    topology = topology_from(
        {"name": "h", "sites": sites, "wan": {"uplink": {"rate_mbps": rate}, "pairs": pairs}}, "h"
    )
    assert list(topology.nodes) == [f"s{i}-{k}" for i, count in enumerate(counts) for k in range(count)]
    for pair in pairs:
        one, other = pair["between"]
        assert topology.rtt_ms(one, other) == topology.rtt_ms(other, one) == pair["rtt_ms"]
