"""A small configuration of every method, for the laws that all of them keep."""

from typing import Any

SMALL_FACTORS = {"name": "lowrank-int4", "rank": 4, "adaptive": True, "max_rank": 6, "block": 32}
ALLREDUCE = {"name": "allreduce"}
DILOCO = {"name": "diloco", "local_steps": 2}
KEEP = {"delay_rounds": 1, "progress": "keep"}
DILOCOX = {"name": "dilocox", "local_steps": 2, "overlap": KEEP, "compressor": SMALL_FACTORS}

METHODS: dict[str, dict[str, Any]] = {
    "allreduce": ALLREDUCE,
    "allreduce naive": {**ALLREDUCE, "collective": "naive"},
    "allreduce bf16": {**ALLREDUCE, "wire": "bf16"},
    "allreduce overlapped": {**ALLREDUCE, "overlap": True, "bucket_mb": 0.02},
    "allreduce accumulated": {**ALLREDUCE, "accumulate": 3},
    "powersgd": {"name": "powersgd", "rank": 2, "start_iter": 3},
    "local_sgd": {"name": "local_sgd", "local_steps": 2},
    "diloco": DILOCO,
    "diloco int4": {**DILOCO, "compressor": {"name": "int4", "block": 32}},
    "opendiloco": {"name": "opendiloco", "local_steps": 2},
    "intellect1": {"name": "intellect1", "local_steps": 2},
    "streaming_diloco": {
        "name": "streaming_diloco",
        "local_steps": 3,
        "fragment_layers": 1,
        "overlap_steps": 1,
    },
    "streaming_diloco late": {
        "name": "streaming_diloco",
        "local_steps": 4,
        "fragment_layers": 2,
        "overlap_steps": 2,
        "merge_alpha": 0.0,
    },
    "cocktail_sgd": {"name": "cocktail_sgd"},
    "cocktail_sgd synchronous": {"name": "cocktail_sgd", "local_steps": 2, "delay_rounds": 0},
    "sparse_loco": {"name": "sparse_loco", "local_steps": 2},
    "demo": {"name": "demo", "compressor": {"size": 16, "k": 8}},
    "eager_diloco": {"name": "eager_diloco", "local_steps": 2},
    "dilocox": DILOCOX,
    "dilocox synchronous": {**DILOCOX, "overlap": {"delay_rounds": 0}},
    "dilocox eager": {**DILOCOX, "overlap": {"delay_rounds": 1, "progress": "eager"}},
    "noloco": {"name": "noloco", "local_steps": 2},
    "noloco int4": {"name": "noloco", "local_steps": 2, "compressor": {"name": "int4", "block": 32}},
}
NO_CONSENSUS = {"eager_diloco", "dilocox eager", "noloco", "noloco int4"}


def changes(name: str) -> dict[str, Any]:
    """What `runs` takes for a method, with the inner optimiser that it needs."""
    method = METHODS[name]
    return (
        {"method": method, "train": {"inner": "sgd", "lr": 0.001}} if name == "demo" else {"method": method}
    )
