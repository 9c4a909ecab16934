import copy

import pytest

from testbed.suspicions import suspicions
from testbed.topology import SHIPPED, load_topology, topology_from

SOUND = {
    "name": "sound",
    "sites": {"a": {"nodes": 2}, "b": {"nodes": 2}, "c": {"nodes": 1}},
    "wan": {
        "uplink": {"rate_mbps": 1000},
        "pairs": [
            {"between": ["a", "b"], "rtt_ms": 20},
            {"between": ["a", "c"], "rtt_ms": 30},
            {"between": ["b", "c"], "rtt_ms": 40},
        ],
    },
}


def found(**changes: object) -> list[str]:
    """What is said of SOUND with other values; keys are paths with _ for a dot."""
    data = copy.deepcopy(SOUND)
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = data
        for parent in parents:
            node = node[int(parent)] if parent.isdigit() else node.setdefault(parent, {})
        node[last] = value
    return suspicions(topology_from(data, "sound"))


def test_nothing_is_said_of_sound_figures():
    assert found() == []


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda p: p.stem)
def test_no_shipped_topology_is_suspicious(path):
    assert suspicions(load_topology(path)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sites__c__uplink": {"rate_mbps": 1}}, "uplink c/up: 1 Mbit/s is 1000 times less"),
        ({"sites__c__uplink": {"rate_mbps": 999}}, None),
        ({"sites__c__uplink": {"rate_mbps": 1.1}}, None),
        ({"wan__uplink": {"rate_mbps": 1}, "sites__c__uplink": {"rate_mbps": 1000}}, "1000 times the others' 1"),
        ({"wan__pairs__0__rtt_ms": 0}, "a to b: RTT 0 ms"),
        ({"wan__pairs__2__rtt_ms": 600, "tcp__buffer_mb": 1000}, "over ten times the way through a (50 ms)"),
        ({"wan__pairs__0__rate_mbps": 1200}, "cap of 1200 Mbit/s is above what the uplinks allow (1000)"),
        ({"wan__pairs__0__rate_mbps": 900}, None),
        ({"wan__pairs__0__queue_bytes": 1_000_000}, "its own queue stays empty"),
        ({"wan__queue_bytes": 200_000}, "wan: a queue of 200 kB is 0.04 bandwidth-delay products"),
        ({"wan__queue_bdp": 0.05}, "0.05 bandwidth-delay products"),
        ({"wan__pairs__0__rate_mbps": 1, "wan__pairs__0__queue_bytes": 20_000}, "less than one super-packet"),
        ({"tcp__buffer_mb": 19}, "less than four bandwidth-delay products of b to c (20.0 MB)"),
        ({"tcp__buffer_mb": 20}, None),
        ({"wan__node_uplink": {"rate_mbps": 2000}}, "is faster than its site's (1000)"),
        ({"sites__a__lan": {"rate_mbps": 50}, "wan__node_uplink": {"rate_mbps": 100}}, "faster than its LAN (50)"),
    ],
)  # fmt: skip
def test_what_was_probably_not_meant_is_said(changes, said):
    sentences = found(**changes)
    assert sentences == [] if said is None else any(said in s for s in sentences), sentences
