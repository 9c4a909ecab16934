"""Rates as people write them. Inside the code units live in names: ``rate_mbps``, ``rtt_ms``, ``queue_bytes``."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

WIRE_BYTES_PER_SEGMENT = 1514
"""Layer-2 bytes of a full TCP segment at MTU 1500: 14 Ethernet + 1500."""
PAYLOAD_BYTES_PER_SEGMENT = 1448
"""TCP payload of that segment: 1500 - 20 IP - 20 TCP - 12 timestamps."""
MIN_RATE_MBPS = 0.008
MAX_RATE_MBPS = 100_000.0

_UNITS_MBPS = {"bit": 1e-6, "kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
RATE_PATTERN = r"^\d+(\.\d+)?\s*([kKmMgG]?[bB]it)(/s|ps)?$"
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(bit|kbit|mbit|gbit)(?:/s|ps)?", re.IGNORECASE)


def parse_rate_mbps(value: Any) -> float:
    """A rate in Mbit/s from a number of Mbit/s or from a string such as ``1Gbit`` (strict: unit required).

    Raises:
        ValueError: not a rate, not positive, or outside what tc htb can shape here.
    """
    allowed = (
        f"allowed is a rate of {MIN_RATE_MBPS} to {MAX_RATE_MBPS:.0f} Mbit/s, as a number or like '1Gbit'"
    )
    if isinstance(value, bool):
        raise ValueError(allowed)
    if isinstance(value, str):
        match = _RATE.fullmatch(value.strip())
        if not match:
            raise ValueError(allowed)
        rate = float(match[1]) * _UNITS_MBPS[match[2].lower()]
    elif isinstance(value, int | float):
        rate = float(value)
    else:
        raise ValueError(allowed)
    if not MIN_RATE_MBPS <= rate <= MAX_RATE_MBPS:  # also refuses NaN
        raise ValueError(allowed)
    return rate


RateMbps = Annotated[float, BeforeValidator(parse_rate_mbps)]


def goodput_mbps(rate_mbps: float, mtu: int = 1500) -> float:
    """TCP payload rate that a layer-2 rate can carry: rate x 1448/1514 at MTU 1500 (956.4 of 1000 Mbit/s)."""
    return rate_mbps * (mtu - 52) / (mtu + 14)
