"""What people write of single nodes: ``nodes: {NAME: {...}}`` of a topology. Pure data, checked."""

from testbed.linkmodel import Uplink
from testbed.validation import Strict


class NodeSettings(Strict):
    """One node's own settings; what is not given is the site's.

    ``uplink``: the node's own link to the WAN, instead of ``node_uplink`` of its site or of the WAN.
    """

    uplink: Uplink | None = None
