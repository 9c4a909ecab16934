"""The claim as arithmetic: throughput when every step waits for an all-reduce, and when nothing waits.

Notation: P parameters, b bytes per value on the wire, D replicas, B tokens that all replicas together train on
between two synchronisations, W bits per second of each replica's link, R tokens per second when nothing waits.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Setting:
    """A training run over slow links.

    Attributes:
        params: P.
        tokens_per_s: R, of all replicas together.
        batch_tokens: B for one step of all replicas.
        replicas: D; each has a link of `rate_mbps`.
        bytes_per_value: b of the all-reduce: 4 for fp32, 2 for fp16 and bf16.
        rate_mbps: W, layer 1 as the paper counts it (no headers).
        rtt_ms: between any two replicas.
        accumulate: steps whose gradients are added up before an all-reduce.
    """

    params: float
    tokens_per_s: float
    batch_tokens: float
    replicas: int = 2
    bytes_per_value: float = 2.0
    rate_mbps: float = 1000.0
    rtt_ms: float = 0.0
    accumulate: int = 1

    @property
    def step_s(self) -> float:
        """Seconds of compute in one step."""
        return self.batch_tokens / self.tokens_per_s

    def exchange_s(self, bytes_per_value: float | None = None) -> float:
        """One tuned all-reduce: 2 (D-1)/D of the volume over each link, and half an RTT for each of two phases."""
        width = self.bytes_per_value if bytes_per_value is None else bytes_per_value
        volume = 2 * (self.replicas - 1) / self.replicas * self.params * width
        return volume * 8 / (self.rate_mbps * 1e6) + self.rtt_ms / 1e3

    def gather_s(self, bits_per_value: float) -> float:
        """Everybody's compressed payload to everybody: (D-1) payloads into each link, half an RTT."""
        volume = (self.replicas - 1) * self.params * bits_per_value / 8
        return volume * 8 / (self.rate_mbps * 1e6) + self.rtt_ms / 2e3

    def allreduce_tokens_per_s(self, *, overlapped: bool = False) -> float:
        """Every `accumulate` steps wait for an all-reduce; `overlapped`: with the backward pass, two thirds of a step."""
        compute_s, exchange_s = self.accumulate * self.step_s, self.exchange_s()
        hidden_s = min(exchange_s, 2 / 3 * self.step_s) if overlapped else 0.0
        return self.accumulate * self.batch_tokens / (compute_s + exchange_s - hidden_s)

    def local_tokens_per_s(self, local_steps: int, bits_per_value: float, *, one_step_late: bool) -> float:
        """H local steps a round, then an exchange of compressed pseudo-gradients, hidden behind the next round or not."""
        compute_s, exchange_s = local_steps * self.step_s, self.gather_s(bits_per_value)
        round_s = max(compute_s, exchange_s) if one_step_late else compute_s + exchange_s
        return local_steps * self.batch_tokens / round_s

    def hidden_speedup(self) -> float:
        """What hiding all communication gains over an all-reduce in every step: 1 + R T / B."""
        return self.tokens_per_s / self.allreduce_tokens_per_s()


def tokens_per_s_at(mfu: float, gpus: int, peak_tflops: float, params: float) -> float:
    """R at a share of the hardware's peak: MFU x GPUs x peak / (6 P)."""
    return mfu * gpus * peak_tflops * 1e12 / (6 * params)


def mfu_of(tokens_per_s: float, gpus: int, peak_tflops: float, params: float) -> float:
    """The opposite of `tokens_per_s_at`."""
    return tokens_per_s * 6 * params / (gpus * peak_tflops * 1e12)


BATCHES = tuple(2**power for power in range(11, 23))
"""Batches that are tried: 2,048 to 4,194,304 tokens."""


@dataclass(frozen=True)
class Candidate:
    """A setting that nobody published and that explains both published AllReduce rates within `tolerance`."""

    replicas: int
    bytes_per_value: float
    batch_tokens: int
    large: float
    small: float


def candidates(
    large: Setting,
    small: Setting,
    published: tuple[float, float],
    *,
    tolerance: float = 0.10,
    replicas: Iterable[int] = (2, 4, 5, 10, 20),
    widths: Iterable[float] = (2.0, 4.0),
    batches: Iterable[int] = BATCHES,
) -> list[Candidate]:
    """All (D, b, B) for which the formula gives both published rates, of the large and of the small model."""
    found = []
    for d, width, batch in itertools.product(replicas, widths, batches):
        rates = [
            replace(
                setting, replicas=d, bytes_per_value=width, batch_tokens=float(batch)
            ).allreduce_tokens_per_s()
            for setting in (large, small)
        ]
        if all(abs(rate / wanted - 1) <= tolerance for rate, wanted in zip(rates, published, strict=True)):
            found.append(Candidate(d, width, batch, *rates))
    return found


def speedup_map(
    setting: Setting,
    batches: npt.NDArray[np.float64],
    mfus: npt.NDArray[np.float64],
    *,
    gpus: int,
    peak_tflops: float,
    local_steps: int,
    bits_per_value: float,
) -> npt.NDArray[np.float64]:
    """[mfus, batches]: one-step-late local training over an all-reduce in every step."""
    table = np.empty((len(mfus), len(batches)))
    for row, mfu in enumerate(mfus):
        rate = tokens_per_s_at(float(mfu), gpus, peak_tflops, setting.params)
        for column, batch in enumerate(batches):
            at = replace(setting, tokens_per_s=rate, batch_tokens=float(batch))
            late = at.local_tokens_per_s(local_steps, bits_per_value, one_step_late=True)
            table[row, column] = late / at.allreduce_tokens_per_s()
    return table


@dataclass(frozen=True)
class Sensitivity:
    """One changed assumption and what the speed-up becomes."""

    changed: str
    allreduce_tokens_per_s: float
    method_tokens_per_s: float

    @property
    def speedup(self) -> float:
        """Throughput of the method over that of the all-reduce."""
        return self.method_tokens_per_s / self.allreduce_tokens_per_s


def sensitivity(
    setting: Setting, local_steps: int, bits_per_value: float, *, gpus: int, peak_tflops: float
) -> list[Sensitivity]:
    """The speed-up with one assumption changed at a time, beginning with none."""

    def row(changed: str, baseline: float, at: Setting) -> Sensitivity:
        return Sensitivity(
            changed, baseline, at.local_tokens_per_s(local_steps, bits_per_value, one_step_late=True)
        )

    def plain(changed: str, at: Setting) -> Sensitivity:
        return row(changed, at.allreduce_tokens_per_s(), at)

    rows = [plain("nothing", setting)]
    for batch in (65_536, 262_144, 1_048_576, 4_194_304):
        rows.append(plain(f"batch of {batch:,} tokens", replace(setting, batch_tokens=float(batch))))
    rows.append(plain("AllReduce in fp32", replace(setting, bytes_per_value=4.0)))
    rows += [plain(f"D = {d}", replace(setting, replicas=d)) for d in (4, 10, 20)]
    rows += [plain(f"{rate:,} Mbit/s", replace(setting, rate_mbps=float(rate))) for rate in (100, 10_000)]
    rows += [plain(f"RTT of {rtt} ms", replace(setting, rtt_ms=float(rtt))) for rtt in (100, 300)]
    rate = tokens_per_s_at(0.4, gpus, peak_tflops, setting.params)
    rows.append(plain("MFU of 40 %", replace(setting, tokens_per_s=rate)))
    accumulating = replace(setting, accumulate=local_steps)
    rows.append(
        row(f"AllReduce accumulates {local_steps} steps", accumulating.allreduce_tokens_per_s(), setting)
    )
    overlapped = accumulating.allreduce_tokens_per_s(overlapped=True)
    rows.append(row(f"AllReduce accumulates {local_steps} steps and overlaps", overlapped, setting))
    return rows
