"""The claim's page: what the number is a ratio of, when it holds and when it does not, as far as arithmetic goes.

No sentence here states a number that was not computed from the claim's figures; each says what it rests on.
"""

from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group
from rich.table import Table

from experiments.claim.arithmetic import (
    Candidate,
    Sensitivity,
    Setting,
    candidates,
    mfu_of,
    sensitivity,
    tokens_per_s_at,
)
from experiments.claim.paper import Claim

REACHABLE_MFU = 0.4
"""What large dense models are trained at on such hardware; the claim's own throughput is far below."""
QUANTISED_BITS = 4.0


@dataclass(frozen=True)
class Arithmetic:
    """What follows from the published figures and our assumptions, by formula alone."""

    claimed: float
    published_ratio: float
    setting: Setting
    small: Setting
    mfu: float
    at_reachable_mfu: Setting
    rows: list[Sensitivity]
    explanations: list[Candidate]
    local_steps: int

    @property
    def speedup(self) -> float:
        """The formula's value for the claim."""
        return self.rows[0].speedup

    @property
    def deviation(self) -> float:
        """Of the formula from the claim."""
        return self.speedup / self.claimed - 1


def examine(claim: Claim) -> Arithmetic:
    """Computes all rows; pure."""
    gpus, peak, steps = int(claim["gpus"]), claim["peak_tflops"], int(claim["local_steps"])
    large = Setting(
        claim["params"],
        claim["dilocox_tokens_per_s"],
        claim["batch_tokens"],
        replicas=int(claim["replicas"]),
        bytes_per_value=claim["bytes_per_value"],
        rate_mbps=claim["rate_mbps"],
        rtt_ms=claim["rtt_ms"],
    )
    small = replace(large, params=claim["small_params"], tokens_per_s=claim["small_dilocox_tokens_per_s"])
    faster = replace(large, tokens_per_s=tokens_per_s_at(REACHABLE_MFU, gpus, peak, claim["params"]))
    return Arithmetic(
        claimed=claim["speedup"],
        published_ratio=claim["dilocox_tokens_per_s"] / claim["allreduce_tokens_per_s"],
        setting=large,
        small=small,
        mfu=mfu_of(large.tokens_per_s, gpus, peak, large.params),
        at_reachable_mfu=faster,
        rows=sensitivity(large, steps, QUANTISED_BITS, gpus=gpus, peak_tflops=peak),
        explanations=candidates(
            large, small, (claim["allreduce_tokens_per_s"], claim["small_allreduce_tokens_per_s"])
        ),
        local_steps=steps,
    )


def sentences(claim: Claim, found: Arithmetic) -> list[str]:
    """The findings in words, each from its numbers."""
    setting, steps = found.setting, found.local_steps
    int4_s, compute_s = setting.gather_s(QUANTISED_BITS), steps * setting.step_s
    faster = found.at_reachable_mfu
    hides = "hides" if int4_s <= steps * faster.step_s else "does not hide"
    accumulating = next(row for row in found.rows if "accumulates" in row.changed)
    batches = sorted({candidate.batch_tokens for candidate in found.explanations})
    return [
        f"{claim['speedup']:.0f} is a ratio of throughputs: the published {claim['dilocox_tokens_per_s']:,.0f} over"
        f" {claim['allreduce_tokens_per_s']:g} tokens/s is {found.published_ratio:.1f}. It is not a ratio of bytes: those are"
        f" {claim['compression']:,.0f}x by the same source.",
        f"The formula gives {found.speedup:.0f}x ({100 * found.deviation:+.0f} %) with D = {setting.replicas},"
        f" {8 * setting.bytes_per_value:.0f}-bit gradients and {setting.batch_tokens:,.0f} tokens a step, none of which is published. It uses"
        f" the published throughput: the row is conditional on it.",
        f"Settings that explain both published AllReduce rates within 10 %: {len(found.explanations)} of those tried, all with"
        f" {batches[0]:,} to {batches[-1]:,} tokens a step. A batch of 4,194,304 tokens leaves"
        f" {next(r.speedup for r in found.rows if '4,194,304' in r.changed):.1f}x.",
        f"Against an AllReduce that accumulates {steps} steps, as DiLoCoX does, {accumulating.speedup:.1f}x is left.",
        f"The published throughput is {100 * found.mfu:.1f} % of the hardware's peak. There a round computes for"
        f" {compute_s:.0f} s and {QUANTISED_BITS:.0f}-bit pseudo-gradients take {int4_s:.0f} s: low rank is not needed for speed. At"
        f" {100 * REACHABLE_MFU:.0f} % a round computes for {steps * faster.step_s:.0f} s, and the same exchange {hides}.",
        f"The published losses differ by {claim['dilocox_loss'] - claim['allreduce_loss']:.2f} nats per token in favour of AllReduce.",
    ]


def page(claim: Claim, found: Arithmetic) -> Group:
    """For a terminal."""
    evidence = Table("evidence", "value", "claimed", "deviation", "rests on", box=None, pad_edge=False)
    rests = "published throughput; D, precision, batch and RTT are ours"
    evidence.add_row(
        "arithmetic",
        f"{found.speedup:.0f}x",
        f"{found.claimed:.0f}x",
        f"{100 * found.deviation:+.1f} %",
        rests,
    )
    for kind in ("counted", "trained", "replayed", "simulated"):
        evidence.add_row(kind, "–", f"{found.claimed:.0f}x", "–", "not examined by this version")
    table = Table("changed", "AllReduce tokens/s", "DiLoCoX tokens/s", "speedup", box=None, pad_edge=False)
    for row in found.rows:
        table.add_row(
            row.changed,
            f"{row.allreduce_tokens_per_s:,.1f}",
            f"{row.method_tokens_per_s:,.0f}",
            f"{row.speedup:,.1f}x",
        )
    second_hand = ", ".join(figure.name for figure in claim.second_hand)
    return Group(
        f"{claim.id}: {claim.claim} ({claim.source})",
        "",
        evidence,
        "",
        *(f"- {sentence}" for sentence in sentences(claim, found)),
        "",
        table,
        "",
        f"Not read in the source by anybody here (verified: false): {second_hand}.",
    )


def as_data(claim: Claim, found: Arithmetic) -> dict[str, Any]:
    """For scripts."""
    return {
        "id": claim.id,
        "claimed": found.claimed,
        "evidence": {
            "arithmetic": {
                "value": found.speedup,
                "deviation": found.deviation,
                "conditional_on": "published throughput",
            }
        },
        "sensitivity": [{"changed": row.changed, "speedup": row.speedup} for row in found.rows],
        "explanations": [vars(candidate) for candidate in found.explanations],
        "findings": sentences(claim, found),
        "unverified": [figure.name for figure in claim.second_hand],
    }
