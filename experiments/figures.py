"""Every figure of a sweep with its caption, and their files."""

from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from experiments import plots
from experiments.drawing import look
from experiments.results import Results


@dataclass(frozen=True)
class Captioned:
    """A figure, the name of its files, and what it shows in a sentence or two."""

    name: str
    figure: Figure
    caption: str


def all_figures(results: Results) -> list[Captioned]:
    """The figures that these results carry; none where no run is valid."""
    runs, evals = results.runs, results.evals
    valid = runs[runs["valid"]]
    found: list[Captioned] = []
    if valid.empty:
        return found
    if evals["run_id"].isin(valid["run_id"]).any():
        found.append(
            Captioned(
                "overview",
                plots.overview(runs, evals),
                "Validation loss over (a) tokens, (b) wall time of training without evaluation, (c) bytes sent"
                " across the WAN so far: the same evaluations in all three. The loss axis is scaled to evaluations after"
                " the start, so lines may enter from above; in (c) an evaluation before any byte was sent has no place"
                " on a logarithmic axis.",
            )
        )
        for name, draw, over in (
            ("loss-vs-tokens", plots.loss_vs_tokens, "tokens, all replicas together"),
            ("loss-vs-time", plots.loss_vs_time, "wall time of training, evaluation excluded"),
            ("loss-vs-wan-bytes", plots.loss_vs_wan_bytes, "bytes sent across the WAN so far"),
        ):
            found.append(
                Captioned(name, draw(runs, evals), f"Validation loss of the outer parameters over {over}.")
            )
    if (valid["wan_bytes_per_token"] > 0).any():
        found.append(
            Captioned(
                "bytes-per-method",
                plots.bytes_per_method(runs),
                "Layer-2 bytes out of the site uplinks per token trained on, each packet counted once. The axis is"
                " logarithmic: read the number, not the length.",
            )
        )
    if (valid["wall_s"] > 0).any():
        found.append(
            Captioned(
                "time-budget",
                plots.time_budget(runs),
                "Where the wall time went, mean over ranks. Exposed communication is time in which a rank waits for"
                " an exchange across the WAN; waiting for the neighbouring stage is the pipeline bubble.",
            )
        )
    if any(
        not plots.uplink_rates(results.links[results.links["run_id"] == run], results.records[run]).empty
        for run in valid["run_id"]
    ):
        found.append(
            Captioned(
                "link-utilisation",
                plots.link_utilisation(runs, results.links, results.records),
                "How busy the site uplinks were, on the same scale in every panel. During evaluations, which the time"
                " axis includes, nothing crosses the WAN.",
            )
        )
    return found


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes `name`.png (200 dpi) and `name`.pdf; the PDF carries no date, so equal figures are equal files."""
    folder.mkdir(parents=True, exist_ok=True)
    png, pdf = folder / f"{name}.png", folder / f"{name}.pdf"
    with look():
        figure.savefig(png)
        figure.savefig(pdf, metadata={"CreationDate": None})
    return [png, pdf]


def save_figures(results: Results) -> list[Captioned]:
    """Draws all figures and writes them to `figures/` in the sweep's folder."""
    found = all_figures(results)
    for captioned in found:
        save(captioned.figure, results.directory / "figures", captioned.name)
    return found
