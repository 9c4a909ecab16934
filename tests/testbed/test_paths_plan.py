"""Caps, queues, MTUs and links of single nodes, as the value that will be made; documents and presets beside it."""

import itertools
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from testbed.access import accesses
from testbed.errors import TestbedError, TopologyError
from testbed.plan import CORE, MIN_QUEUE_BYTES, plan_network, queue_bytes
from testbed.shaping import netem, paths, rate
from testbed.topology import SHIPPED, load_topology, topology_from

ROOT = SHIPPED.parent
PAGE = (ROOT / "docs" / "topologies.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@st.composite
def topologies(draw):
    names = [f"s{i}" for i in range(draw(st.integers(2, 5)))]
    rates = st.floats(0.1, 10_000)
    sites = {
        name: {
            "nodes": draw(st.integers(1, 3)),
            "uplink": {"up_mbps": draw(rates), "down_mbps": draw(rates)},
            **draw(st.sampled_from([{}, {"node_uplink": {"up_mbps": 5, "down_mbps": 50}}])),
        }
        for name in names
    }
    pairs = []
    for one, other in itertools.combinations(names, 2):
        pair = {"between": [one, other], "rtt_ms": draw(st.floats(0, 500))}
        if draw(st.booleans()):
            pair["rate_mbps"] = draw(rates)
        pair |= draw(st.sampled_from([{}, {"queue_bdp": 2}, {"queue_bytes": 300_000}]))
        pair |= draw(st.sampled_from([{}, {"mtu": 1200}]))
        pairs.append(pair)
    wan = {"uplink": {"rate_mbps": 100}, "pairs": pairs}
    return topology_from({"name": "h", "sites": sites, "wan": wan}, "h")


@given(topologies())
def test_any_matrix_caps_and_queues_give_a_consistent_plan(topology):
    plan = plan_network(topology)
    for path in plan.delays:
        pair, link = topology.pair(path.source, path.target), plan.link(path.link)
        assert path.ceil_mbps == min(pair.rate_mbps or link.rate_mbps, link.rate_mbps)
        assert 0 < path.sure_mbps <= path.ceil_mbps
        expected = plan.wan_rate_mbps(path.source, path.target)
        ends = [topology.node_uplink(topology.nodes_of(site)[0]) for site in (path.source, path.target)]
        own = [end.up if out else end.down for end, out in zip(ends, (True, False), strict=True) if end]
        limits = [topology.uplink(path.source).up, path.ceil_mbps, *own, 10_000.0]
        assert expected == min(limits)
        assert plan.mtu(path.source, path.target) == (pair.mtu or 1500)
        if pair.queue_bytes:
            assert path.queue_bytes == pair.queue_bytes
    for link in plan.links:  # htb keeps children's rates, so they must fit into the link
        sure = [p.sure_mbps for p in plan.delays if p.link == link.name and p.own_class]
        said = [int(r) / 1e6 for line in rate.commands(link) if "parent 1:1 " in line
                for r in re.findall(r" rate (\d+)bit", line)]  # fmt: skip
        assert sum(sure) + sum(said) <= link.rate_mbps * (1 + 1e-6) + 0.003


@given(topologies())
def test_both_mechanisms_cap_the_same_paths_at_the_same_rate_with_the_same_queue(topology):
    plan = plan_network(topology)

    def classes_of(lines):
        found = {}
        for line in lines:
            if match := re.search(r"class add dev (\w+) .*classid 1:(\w+) .* ceil (\d+)bit", line):
                found[match[1], match[2]] = int(match[3])
        return found

    by_line, by_netem = classes_of(paths.commands(plan)), classes_of(netem.commands(plan))
    assert by_line.items() <= by_netem.items()
    assert len(by_line) == sum(path.own_class for path in plan.delays)
    for lines in (paths.commands(plan), netem.commands(plan)):
        limits = [int(n) for line in lines for n in re.findall(r"bfifo limit (\d+)", line)]
        assert {path.queue_bytes for path in plan.delays if path.own_class} <= set(limits)


def test_topologies_without_new_figures_are_made_as_before():
    plan = plan_network(load_topology("two-sites-1gbps"))
    assert paths.commands(plan) == paths.mtu_commands(plan) == accesses(plan) == []
    assert not any(link.reserved_share or link.node_uplink for link in plan.links)
    assert not plan.single_segments


CAPPED = {
    "name": "c",
    "sites": {"a": {"nodes": 2}, "b": {}},
    "wan": {
        "uplink": {"rate_mbps": 100},
        "pairs": [{"between": ["a", "b"], "rtt_ms": 40, "rate_mbps": "30Mbit", "queue_bdp": 2, "mtu": 1300}],
    },
}


def test_a_capped_path_has_its_own_class_queue_and_route():
    plan = plan_network(topology_from(CAPPED, "c"))
    path = plan.path("a", "b")
    assert (path.ceil_mbps, path.queue_bytes, path.mtu) == (30, 300_000, 1300)
    assert "classid 1:100 htb rate 30000000bit ceil 30000000bit" in paths.commands(plan)[0]
    assert paths.mtu_commands(plan)[:2] == [
        "route add 10.2.0.0/16 via 172.31.2.2 mtu 1300 table 1000",
        "rule add iif s1 to 10.2.0.0/16 lookup 1000 priority 2000",
    ]


def test_what_the_kernel_made_of_a_path_is_compared_with_what_was_asked():
    plan = plan_network(topology_from(CAPPED, "c"))
    shows = {
        interface: f"class htb 1:{minor} parent 1:1 leaf {minor}: prio 0 rate 30Mbit ceil 30Mbit burst 1b"
        for interface, minor in (("s2", "100"), ("s1", "101"))
    }
    queues = (
        '[{"dev":"s2","parent":"1:100","options":{"limit":300000}},'
        '{"dev":"s1","parent":"1:101","options":{"limit":300000}}]'
    )
    paths.verify(plan, shows, queues)
    with pytest.raises(TestbedError, match="path a to b: asked tc for 30 Mbit/s"):
        paths.verify(plan, {**shows, "s2": shows["s2"].replace("ceil 30", "ceil 300")}, queues)
    with pytest.raises(TestbedError, match="path b to a: asked tc for a queue of 300000 bytes"):
        paths.verify(
            plan, shows, queues.replace('101","options":{"limit":300000', '101","options":{"limit":3')
        )
    with pytest.raises(TestbedError, match="asked for an MTU of 1300 bytes, the kernel reports None"):
        paths.verify_mtus(plan, "[]", "[]")


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ({"queue_bdp": 1, "queue_bytes": 200_000}, "allowed is one of them"),
        ({"queue_bytes": 100}, "queue_bytes: found 100"),
        ({"queue_bdp": 0}, "queue_bdp: found 0"),
        ({"mtu": 9000}, "at most the topology's mtu (1500)"),
        ({"mtu": 100}, "mtu: found 100"),
        ({"rate_mbps": "30 MB"}, "allowed is a rate"),
        ({"rate_mbps": "1G"}, "allowed is a rate"),
    ],
)
def test_a_wrong_figure_of_a_path_is_one_sentence(pair, said):
    data = {
        **CAPPED,
        "wan": {"uplink": {"rate_mbps": 100}, "pairs": [{"between": ["a", "b"], "rtt_ms": 4, **pair}]},
    }
    with pytest.raises(TopologyError) as caught:
        topology_from(data, "c")
    assert said in str(caught.value)


def test_nodes_settings_are_read_kept_and_refused_for_unknown_nodes():
    data = {**CAPPED, "nodes": {"a-1": {"uplink": {"rate_mbps": "7Mbit"}}}}
    topology = topology_from(data, "c")
    assert topology.node_uplink("a-0") is None
    assert topology.node_uplink("a-1").up == 7
    again = topology_from(topology.model_dump(mode="json"), "again")
    assert again == topology
    assert plan_network(again) == plan_network(topology)
    with pytest.raises(TopologyError, match="unknown node 'x'"):
        topology_from({**CAPPED, "nodes": {"x": {}}}, "c")
    with pytest.raises(TopologyError, match="did you mean 'uplink'"):
        topology_from({**CAPPED, "nodes": {"a-1": {"uplnk": {}}}}, "c")


def test_the_most_particular_uplink_of_a_node_counts_and_is_shaped_at_the_sending_end():
    data = {**CAPPED, "nodes": {"a-1": {"uplink": {"up_mbps": 7, "down_mbps": 8}}}}
    data["wan"] = {**CAPPED["wan"], "node_uplink": {"rate_mbps": 5}}
    plan = plan_network(topology_from(data, "c"))
    rates = {name: plan.link(name).node_uplink.rate_mbps for name in ("a-0", "a-1", "a-1/down", "b-0/down")}
    assert rates == {"a-0": 5, "a-1": 7, "a-1/down": 8, "b-0/down": 5}
    assert plan.rate_mbps("a-0", "a-1") == 10_000  # inside the site the uplinks do not count
    assert plan.rate_mbps("a-1", "b-0") == 5
    assert {a.link for a in accesses(plan)} == {
        f"{n}/wan-{s}" for n in ("a-0", "a-1", "b-0") for s in ("up", "down")
    }


def test_queues_follow_the_first_rule_that_says_a_length():
    wan = load_topology("two-sites-1gbps").wan
    assert queue_bytes(1000, 30, wan) == 3_750_000
    assert queue_bytes(0.1, 1, wan) == MIN_QUEUE_BYTES
    assert queue_bytes(1000, 30, wan.model_copy(update={"queue_bytes": 200_000})) == 200_000


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.split("\n")[0])
def test_the_examples_of_the_page_are_topologies(text):
    plan = plan_network(topology_from(yaml.safe_load(text), "docs/topologies.md"))
    assert plan.delays and CORE in plan.namespaces


def test_the_page_lists_every_preset():
    assert EXAMPLES
    for path in Path(SHIPPED).glob("*.yaml"):
        assert f"`{path.stem}`" in PAGE
