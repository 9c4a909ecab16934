"""One self-contained page about a sweep: what came out, over which links, and whether to believe it."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments import narrative, page, tables
from experiments.event_rows import event_rows
from experiments.figures import Captioned, save_figures
from experiments.results import Results, load
from experiments.runfolder import section

WORDS = (
    (
        "payload bytes",
        "Tensor bytes that a rank hands to the transport, with what travels for scales and indices.",
    ),
    (
        "wire bytes",
        "Layer-2 bytes as the queueing disciplines count them, with headers, acknowledgements and retransmissions."
        " The WAN total is the sum over the site uplinks' egress: each packet once.",
    ),
    (
        "kernel-acked bytes",
        "Payload that TCP delivered, summed over sockets: a count independent of the trainer's.",
    ),
    ("overhead", "WAN wire bytes over WAN payload bytes."),
    ("volume reduction", "The baseline's WAN wire bytes per token over the method's. Not a speedup."),
    ("speedup", "The method's tokens per second over the baseline's."),
    (
        "speedup to loss",
        "The baseline's wall time over the method's until the same validation loss: the higher of the two final ones.",
    ),
    (
        "baseline",
        "The fastest valid run that the sweep names as its baseline with the same seed, model, data, batch, pace,"
        " network and kind of evidence.",
    ),
    ("H, round", "Local steps between two exchanges; a round is one outer step."),
    ("exposed communication", "Wall time in which a rank waits for an exchange across the WAN."),
    ("pipeline bubble", "Wall time in which a rank waits for the neighbouring stage."),
    ("wall time", "Time of training, without evaluation."),
    ("validation loss", "Of the outer parameters, in nats per token; at the end every exchange is drained."),
    (
        "evidence",
        "arithmetic: a formula. counted: bytes produced by the real code. simulated. replayed: real bytes on emulated"
        " links, paced compute. trained: real training on emulated links.",
    ),
)


def write_report(directory: str | Path, *, mixed: bool = False) -> Path:
    """Writes `report.html` and `figures/` into a sweep's folder; returns the path of the page.

    The page needs no other file and no network. It is written in one step.

    Raises:
        RequestError: as `experiments.results.load`, which `mixed` is handed to.
    """
    results = load(directory, mixed=mixed)
    figures = save_figures(results)
    path = results.directory / "report.html"
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(render(results, figures), encoding="utf-8")
    temporary.replace(path)
    return path


def render(results: Results, figures: Iterable[Captioned]) -> str:
    """The page as text."""
    title = _title(results)
    kinds = ", ".join(sorted(set(results.runs[results.runs["valid"]]["evidence"]))) or "none"
    body = [page.heading(title, 1), page.paragraph(f"Kind of evidence: {kinds}", "quiet")]
    sentences = narrative.summary(results.runs, results.records)
    kind = "lead" if results.runs["valid"].any() else "warning"
    body += [page.paragraph(text, kind) for text in sentences]
    for part in (_results, _not_counted, _events, _links, _accounting, _fidelity, _environment):
        body += part(results)
        if part is _results:
            body += _figures(figures)
    body += [page.heading("Words"), page.definitions(WORDS)]
    return page.page(title, body)


def _title(results: Results) -> str:
    names = {str(record["name"]) for record in results.records.values() if record.get("name")}
    return names.pop() if len(names) == 1 else results.directory.resolve().name


def _results(results: Results) -> list[str]:
    rows = tables.table_rows(results.runs)
    return [
        page.heading("Results"),
        page.table(tables.HEADS, rows, text_columns=(0, 2)),
        page.paragraph(tables.note(results.runs), "quiet"),
    ]


def _figures(figures: Iterable[Captioned]) -> list[str]:
    """The overview where the screen is wide or on paper, its three panels one by one on a phone."""
    body = []
    for captioned in figures:
        kind = "column"
        if captioned.name == "overview":
            kind = "wide"
        elif captioned.name.startswith("loss-vs-"):
            kind = "narrow"
        body.append(page.figure(captioned, kind))
    return [page.heading("Figures"), *body] if body else []


def _not_counted(results: Results) -> list[str]:
    lines = tables.problem_lines(results.runs)
    return [page.heading("Runs that do not count"), page.bullets(lines)] if lines else []


def _links(results: Results) -> list[str]:
    rows = []
    for run, record in results.records.items():
        for pair in section(record, "links").get("measured") or []:
            rows.append(
                [
                    run,
                    _text(pair.get("when")),
                    f"{pair.get('source', '?')} → {pair.get('target', '?')}",
                    _number(pair.get("rtt_wanted_ms")),
                    _number(pair.get("rtt_ms"), 4),
                    _number(pair.get("rate_wanted_mbps")),
                    _number(pair.get("goodput_wanted_mbps"), 4),
                    _number(pair.get("goodput_mbps"), 4),
                    _text(pair.get("ok")),
                ]
            )
    heads = [
        "run",
        "when",
        "direction",
        "RTT wanted (ms)",
        "RTT measured (ms)",
        "rate wanted (Mbit/s, layer 2)",
    ]
    heads += ["TCP payload possible (Mbit/s)", "TCP payload measured (Mbit/s)", "within tolerance"]
    if not rows:
        return [
            page.heading("Links"),
            page.paragraph("No link was measured: no emulated network, or no record of it."),
        ]
    return [page.heading("Links, wanted and measured"), page.table(heads, rows, text_columns=(0, 1, 2))]


def _events(results: Results) -> list[str]:
    """What changed while the runs went on; nothing where nothing did."""
    rows, notes = event_rows(results.records)
    if not rows and not notes:
        return []
    heads = ["run", "event", "what happened", "asked for (s)", "in effect (s)", "later by (ms)"]
    body = [page.heading("Events"), page.table(heads, rows, text_columns=(0, 2))] if rows else []
    return body + ([page.bullets(notes)] if notes else [])


def _accounting(results: Results) -> list[str]:
    keys = (
        *("wan_payload_bytes", "kernel_wan_bytes", "kernel_deviation", "wan_wire_bytes", "wan_overhead"),
        *(
            "retransmitted_bytes",
            "lan_payload_bytes",
            "kernel_lan_bytes",
            "lan_wire_bytes",
            "control_wire_bytes",
        ),
    )
    heads = [
        "run",
        "WAN payload",
        "WAN kernel-acked",
        "kernel / payload − 1",
        "WAN wire",
        "overhead (wire / payload)",
    ]
    heads += ["retransmitted", "LAN payload", "LAN kernel-acked", "LAN wire", "control (wire)"]
    rows = []
    for run, record in results.records.items():
        counts = section(record, "accounting")
        if counts:
            rows.append([run, *(_account(key, counts.get(key)) for key in keys)])
    title = page.heading("Bytes, counted three ways")
    if not rows:
        return [title, page.paragraph("No byte account was recorded.")]
    return [title, page.table(heads, rows), page.paragraph("In bytes, of the whole run.", "quiet")]


def _account(key: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return "–"
    if key == "kernel_deviation":
        return f"{100 * value:+.3f} %"
    return f"{value:.4f}" if key == "wan_overhead" else f"{value:,.0f}"


def _fidelity(results: Results) -> list[str]:
    found = {run: section(record, "fidelity") for run, record in results.records.items()}
    keys = list(dict.fromkeys(key for facts in found.values() for key in facts if key != "problems"))
    title = page.heading("Fidelity of the machine")
    if not keys:
        return [title, page.paragraph("Nothing was watched: no emulated network, or no record of it.")]
    rows = [
        [
            run,
            *(_number(facts.get(key)) for key in keys),
            "; ".join(map(str, facts.get("problems") or [])) or "none",
        ]
        for run, facts in found.items()
    ]
    heads = ["run", *(key.replace("_", " ") for key in keys), "broken promises"]
    return [title, page.table(heads, rows, text_columns=(0, len(heads) - 1))]


def _environment(results: Results) -> list[str]:
    """One block per distinct environment, with the runs made in it."""
    alike: dict[str, list[str]] = {}
    for run, record in results.records.items():
        facts = {key: record.get(key) for key in ("commit", "dirty", "kernel", "machine", "versions", "data")}
        if any(value is not None for value in facts.values()):
            alike.setdefault(json.dumps(facts, sort_keys=True, default=str), []).append(run)
    body = [page.heading("Environment")]
    if not alike:
        body.append(page.paragraph("No environment was recorded."))
    for text, runs in alike.items():
        facts = json.loads(text)
        changed = {True: " with uncommitted changes", False: "", None: " (state of the checkout not known)"}
        pairs = [
            ("runs", ", ".join(runs)),
            ("commit", f"{facts['commit'] or 'not known'}{changed.get(facts['dirty'], '')}"),
            ("kernel", _text(facts["kernel"])),
            ("machine", _mapping(facts["machine"])),
            ("versions", _mapping(facts["versions"])),
            ("data", _mapping(facts["data"])),
        ]
        body.append(page.definitions(pairs))
    return body


def _mapping(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items() if inner is not None)
    return _text(value)


def _number(value: Any, digits: int = 3) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _text(value)
    return tables.significant(value, digits) if math.isfinite(value) else "–"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)
