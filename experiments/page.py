"""The few pieces of HTML that a report is made of; every text that goes in is escaped here."""

import base64
import io
from collections.abc import Sequence
from html import escape

from experiments.drawing import look
from experiments.figures import Captioned

CSS = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #1b1b1b;
  max-width: 70rem; margin: 0 auto; padding: 1.2rem; background: #fff; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .4rem 0 .2rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid #ccc; padding-bottom: .2rem; }
p { max-width: 46rem; } .quiet { color: #555; font-size: .9rem; }
.lead { font-size: 1.05rem; }
.warning { border-left: 4px solid #D55E00; padding: .3rem .8rem; background: #fdf3ec; }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .5rem; text-align: right; vertical-align: top; }
td { white-space: pre; }
th { border-bottom: 1.5px solid #444; vertical-align: bottom; font-weight: 600; }
td { border-bottom: 1px solid #e4e4e4; }
th.text, td.text { text-align: left; }
td.long { white-space: pre-line; min-width: 14rem; }
figure { margin: 1.4rem 0; } figure img { display: block; width: 100%; height: auto; }
figure.column img { max-width: 30rem; }
figcaption { font-size: .85rem; color: #444; max-width: 46rem; margin-top: .3rem; }
dl { max-width: 46rem; } dt { font-weight: 600; margin-top: .6rem; } dd { margin: 0 0 0 1.2rem; }
code { font-size: .88em; overflow-wrap: anywhere; }
.narrow { display: none; }
@media screen and (max-width: 44rem) { body { padding: .8rem; } .wide { display: none; } .narrow { display: block; } }
@media print { body { max-width: none; font-size: 10pt; padding: 0; } .scroll { overflow: visible; }
  table { font-size: 6.8pt; } th, td { padding: .12rem .25rem; } figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; } td { white-space: pre-line; } td.long { min-width: 0; } }
"""


_LONG = 60
"""Cells with more characters than this break into lines."""


def page(title: str, body: Sequence[str]) -> str:
    """A whole document; `body` is HTML already."""
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(body) + "\n</body>\n</html>\n"


def heading(text: str, level: int = 2) -> str:
    """A heading."""
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph; `kind` is its class: `lead`, `quiet` or `warning`."""
    return f'<p class="{escape(kind)}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def bullets(items: Sequence[str]) -> str:
    """An unordered list."""
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def definitions(pairs: Sequence[tuple[str, str]]) -> str:
    """Words and what they mean."""
    return (
        "<dl>" + "".join(f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in pairs) + "</dl>"
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Sequence[int] = (0,)) -> str:
    """A table that scrolls sideways where the screen is narrow; `text_columns` are aligned left."""

    def cells(row: Sequence[str], tag: str) -> str:
        found = []
        for number, cell in enumerate(row):
            kinds = (["text"] if number in text_columns else []) + (["long"] if len(cell) > _LONG else [])
            kind = f' class="{" ".join(kinds)}"' if kinds else ""
            found.append(f"<{tag}{kind}>{escape(cell)}</{tag}>")
        return f"<tr>{''.join(found)}</tr>"

    body = "".join(cells(row, "td") for row in rows)
    return (
        f'<div class="scroll"><table><thead>{cells(heads, "th")}</thead><tbody>{body}</tbody></table></div>'
    )


def figure(captioned: Captioned, kind: str = "column") -> str:
    """A figure as a vector image inside the document; `kind` is its class."""
    buffer = io.BytesIO()
    with look():
        captioned.figure.savefig(buffer, format="svg", metadata={"Date": None})
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return (
        f'<figure class="{escape(kind)}"><img alt="{escape(captioned.caption)}"'
        f' src="data:image/svg+xml;base64,{data}"><figcaption>{escape(captioned.caption)}</figcaption></figure>'
    )
