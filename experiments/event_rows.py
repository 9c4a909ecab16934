"""Events of runs as rows and sentences for the report."""

from collections.abc import Mapping
from typing import Any

from experiments.runfolder import section

MOST_ROWS = 40
"""Of one run; the rest is in events.parquet."""


def event_rows(records: Mapping[str, Mapping[str, Any]]) -> tuple[list[list[str]], list[str]]:
    """(rows: run, event, what, asked for and in effect in s, later by in ms; sentences about the rest)."""
    rows: list[list[str]] = []
    notes: list[str] = []
    for run, record in records.items():
        events = section(dict(record), "events")
        happened = events.get("happened") or []
        for one in happened[:MOST_ROWS]:
            effect_s = one.get("effect_s")
            failed = effect_s is None
            rows.append(
                [
                    run,
                    str(one.get("event")),
                    f"{one.get('what')}{': ' + str(one.get('problem')) if failed else ''}",
                    f"{one.get('asked_s', 0.0):.2f}",
                    "never" if failed else f"{effect_s:.2f}",
                    "–" if failed else f"{1e3 * one.get('late_s', 0.0):.0f}",
                ]
            )
        if len(happened) > MOST_ROWS:
            notes.append(f"{run}: {len(happened) - MOST_ROWS} more changes are in its events.parquet")
        for trace in events.get("traces") or []:
            notes.append(
                f"{run}: event {trace['event']}, a trace, changed its link {trace['changes']} times,"
                f" at most {1e3 * trace['late_max_s']:.0f} ms late"
            )
        notes += [
            f"{run}: not reached before the training ended: {one}" for one in events.get("not_reached") or []
        ]
    return rows, notes
