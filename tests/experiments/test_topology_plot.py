from pathlib import Path

import pytest

from experiments.topology_plot import draw
from testbed.topology import SHIPPED, load_topology


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_site_and_every_path_is_drawn_with_its_figures(path: Path):
    topology = load_topology(path)
    texts = [text.get_text() for text in draw(topology).axes[0].texts]
    for site in topology.sites:
        assert any(text.startswith(f"{site}\n") for text in texts)
    redrawn = {frozenset(e.pair): e.rtt_quartiles_ms for e in topology.events if e.do == "rtt"}
    for pair in topology.wan.pairs if topology.wan else []:
        quartiles = redrawn.get(frozenset(pair.between))
        wanted = f"{quartiles[1]:g} – {quartiles[2]:g} – " if quartiles else f"{pair.rtt_ms:g} ms"
        assert any(text.startswith(wanted) for text in texts)
    pairs = len(topology.wan.pairs) if topology.wan else 0
    assert len(texts) == len(topology.sites) + pairs + bool(topology.events)
