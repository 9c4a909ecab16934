"""Bytes counted three ways, and whether they agree.

The trainer counts the payload it hands to the transport, and apart from it the transport's own framing; the kernel
counts, per TCP flow, the bytes that the peer acknowledged (``ss``); the queueing disciplines of the site uplinks
count layer-2 bytes. Payload + framing and the second must agree within 1 %; the third must lie a stated factor above
them: headers (1514/1448 = 1.046) and acknowledgements.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from testbed.counters import Reading
from testbed.plan import NetworkPlan
from testbed.sockets import Flow

KERNEL_TOLERANCE = 0.01
WIRE_OVERHEAD_BAND = (1.04, 1.09)
MIN_BYTES_TO_JUDGE = 1_000_000
"""Below this, connection set-up alone is more than 1 %; the counts are recorded and not judged."""


@dataclass
class Accounting:
    """The three counts of a run, for WAN and LAN, and every disagreement as a sentence. All in bytes."""

    wan_payload_bytes: int
    lan_payload_bytes: int  # of training
    evaluation_bytes: int  # activations of evaluations: on the LAN too, but in no figure of a method
    wan_framing_bytes: int = 0  # headers of our own transport, exactly; gloo's are not known
    kernel_wan_bytes: int | None = None
    kernel_lan_bytes: int | None = None
    kernel_control_bytes: int | None = None
    retransmitted_bytes: int | None = None
    wan_wire_bytes: int | None = None
    lan_wire_bytes: int | None = None
    control_wire_bytes: int | None = None
    wan_overhead: float | None = None  # wire / payload
    kernel_deviation: float | None = None  # WAN: kernel / (payload + framing) - 1
    problems: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """As plain data for the record."""
        return asdict(self)


def wire_bytes(
    plan: NetworkPlan, before: Mapping[str, Reading], after: Mapping[str, Reading]
) -> tuple[int, int, int]:
    """(WAN, LAN, control) layer-2 bytes between two readings, each packet once.

    The WAN is the sum over the site uplinks' egress, rendezvous traffic apart. Every packet enters a node once;
    what did not come down from the WAN came from the LAN (what an uplink's queue dropped is in neither).
    """

    def sent(link: str) -> int:
        return after[link].tx_bytes - before[link].tx_bytes

    uplinks = list(plan.uplinks.values())
    control = sum(after[link].control_bytes - before[link].control_bytes for link in uplinks)
    through_uplinks = sum(sent(link) for link in uplinks)
    into_nodes = sum(sent(f"{node}/down") for node in plan.node_address)
    from_the_wan = sum(sent(f"{site}/down") for site in plan.uplinks)
    return through_uplinks - control, into_nodes - from_the_wan, control


def kernel_bytes(plan: NetworkPlan, flows: Iterable[Flow]) -> tuple[int, int, int, int]:
    """(WAN, LAN, control, retransmitted) payload bytes that TCP delivered."""
    site = plan.site_of_address()
    wan = lan = control = retransmitted = 0
    for flow in flows:
        retransmitted += flow.retransmitted_bytes
        if flow.is_control:
            control += flow.acked_bytes
        elif site.get(flow.local) == site.get(flow.peer):
            lan += flow.acked_bytes
        else:
            wan += flow.acked_bytes
    return wan, lan, control, retransmitted


def with_earlier(counts: Accounting, carried: tuple[int, int, int]) -> Accounting:
    """A resumed run's counts: payload of all its processes; kernel and wire saw only the last ones, so not those.

    Args:
        counts: of the last processes, reconciled.
        carried: (WAN, LAN, evaluation) payload that earlier processes had sent by the checkpoint.
    """
    if not any(carried):
        return counts
    return Accounting(
        counts.wan_payload_bytes + carried[0],
        counts.lan_payload_bytes + carried[1],
        counts.evaluation_bytes + carried[2],
        problems=counts.problems,
    )


def reconcile(
    payload: tuple[int, int, int],
    kernel: tuple[int, int, int, int] | None,
    wire: tuple[int, int, int] | None,
    wan_framing_bytes: int = 0,
) -> Accounting:
    """Puts the three counts side by side. Pure.

    Args:
        payload: (WAN, LAN, evaluation) as the trainer counted.
        kernel: result of :func:`kernel_bytes`, None on loopback.
        wire: result of :func:`wire_bytes`, None on loopback.
        wan_framing_bytes: what the transport says it sent beside the payload.
    """
    result = Accounting(*payload, wan_framing_bytes=wan_framing_bytes)
    framed = payload[0] + wan_framing_bytes
    if kernel is not None:
        result.kernel_wan_bytes, result.kernel_lan_bytes = kernel[0], kernel[1]
        result.kernel_control_bytes, result.retransmitted_bytes = kernel[2], kernel[3]
        for name, said, acked in (
            ("WAN", framed, kernel[0]),
            ("LAN", payload[1] + payload[2], kernel[1]),
        ):
            deviation = acked / said - 1 if said else 0.0
            if name == "WAN":
                result.kernel_deviation = deviation
            if max(said, acked) >= MIN_BYTES_TO_JUDGE and (not said or abs(deviation) > KERNEL_TOLERANCE):
                result.problems.append(
                    f"{name} payload: the trainer says {said} bytes with framing, the kernel delivered {acked}"
                    f" ({100 * deviation:+.2f} %, allowed ±{100 * KERNEL_TOLERANCE:g} %)"
                )
    if wire is not None:
        result.wan_wire_bytes, result.lan_wire_bytes, result.control_wire_bytes = wire
        low, high = WIRE_OVERHEAD_BAND
        if payload[0]:
            result.wan_overhead = wire[0] / payload[0]
            # What loss made TCP repeat is no overhead. The uplink counted a lost packet if it was lost further on,
            # not if its own queue dropped it, so the bytes sent once lie between these two.
            least, most = (wire[0] - (kernel[3] if kernel else 0)) / framed, wire[0] / framed
            if payload[0] >= MIN_BYTES_TO_JUDGE and (most < low or least > high):
                result.problems.append(
                    f"WAN wire bytes are {most:.4f} x payload ({least:.4f} without retransmissions),"
                    f" allowed {low} to {high}"
                )
    return result


def congestion_problems(wanted: str, ranks: Iterable[Mapping[str, Any]]) -> list[str]:
    """One sentence for each rank whose connections across the WAN ran another congestion control than was asked for."""
    return [
        f"rank {rank['rank']}: TCP ran {', '.join(found)} across the WAN, the topology asked for {wanted}"
        for rank in ranks
        if (found := rank.get("wan_congestion_control")) and found != [wanted]
    ]
