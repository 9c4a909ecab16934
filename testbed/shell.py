"""Mininet's own command line in a network of ours: ``north-0 ping south-1``, ``net``, ``pingall``, ``iperf``."""

import string

from mininet.cli import CLI
from mininet.log import setLogLevel

from testbed.network import Network


class _Shell(CLI):  # type: ignore[misc]
    """Our node names have hyphens, which Python's ``cmd`` does not count as part of a command's name."""

    identchars = string.ascii_letters + string.digits + "_-"
    prompt = "dilocox> "


def shell(network: Network) -> None:
    """Reads commands until ``exit`` or the end of standard input."""
    setLogLevel("info")
    _Shell(network.net)
