"""The report as Markdown, and as one HTML page without scripts and without links to a network."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from lrattnres.report.figures import Picture
from lrattnres.report.tables import Table

Part = str | list[str] | Table | Picture  # a paragraph, a list, …


@dataclass(frozen=True)
class Section:
    """A part of the report with a heading.

    Attributes:
        anchor: Its address in the page.
        heading: Its title.
        parts: Paragraphs, lists, tables and pictures.
    """

    anchor: str
    heading: str
    parts: list[Part]


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff }
body { max-width: 1180px; margin: 2em auto; padding: 0 1.2em }
h1, h2, h3 { line-height: 1.25 } h3 { margin-top: 1.8em }
h2 { margin-top: 2.2em; border-bottom: 1px solid #ccc }
figure { margin: 1em 0 } img { max-width: 100%; height: auto }
figcaption, .note { font-size: 13px; color: #444; max-width: 60em }
.table { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: 3px 9px; border-bottom: 1px solid #ddd; text-align: right }
th, td { vertical-align: bottom; overflow-wrap: anywhere }
th { border-bottom: 2px solid #888; max-width: 8em; overflow-wrap: normal }
th:first-child, td:first-child, .text { text-align: left }
tr.missing { color: #767676 } nav a { margin-right: 1em }
"""


def html_page(title: str, sections: list[Section], drawings: Mapping[str, bytes]) -> str:
    """The report as HTML.

    Args:
        title: Of the page.
        sections: In order.
        drawings: SVG file of each picture, by the picture's name.
    """
    links = "".join(
        f'<a href="#{section.anchor}">{escape(section.heading)}</a>' for section in sections
    )
    body = "".join(_html_section(section, drawings) for section in sections)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{escape(title)}</title><style>{STYLE}</style>"
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n'
        f"<body>\n<h1>{escape(title)}</h1>\n"
        f"<nav>{links}</nav>\n{body}</body></html>\n"
    )


def markdown_page(title: str, sections: list[Section]) -> str:
    """The report as Markdown, which shows the PNG files in figures/.

    Args:
        title: Of the page.
        sections: In order.
    """
    lines = [f"# {title}", ""]
    for section in sections:
        lines += [f"## {section.heading}", ""]
        for part in section.parts:
            lines += [*_markdown(part), ""]
    return "\n".join(lines)


def _html_section(section: Section, drawings: Mapping[str, bytes]) -> str:
    parts = "".join(_html(part, drawings) for part in section.parts)
    return (
        f'<section id="{section.anchor}">\n<h2>{escape(section.heading)}</h2>\n{parts}</section>\n'
    )


def _html(part: Part, drawings: Mapping[str, bytes]) -> str:
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>\n"
    if isinstance(part, list):
        return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in part) + "</ul>\n"
    if isinstance(part, Table):
        return _html_table(part)
    source = f"data:image/svg+xml;base64,{base64.b64encode(drawings[part.name]).decode()}"
    return (
        f'<h3>{escape(part.title)}</h3>\n<figure><img alt="{escape(part.title)}" src="{source}">\n'
        f"<figcaption>{escape(part.caption)} Data: figures/{part.name}.csv</figcaption></figure>\n"
    )


def _html_table(table: Table) -> str:
    texts = [
        any(_is_text(row[column]) for row in table.rows) for column in range(len(table.columns))
    ]
    marks = [' class="text"' if text else "" for text in texts]
    head = "".join(
        f'<th scope="col"{mark}>{escape(column)}</th>'
        for column, mark in zip(table.columns, marks, strict=True)
    )
    body = "".join(
        ('<tr class="missing">' if row[-1] == "missing" else "<tr>")
        + "".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(row, marks, strict=True))
        + "</tr>\n"
        for row in table.rows
    )
    notes = "".join(
        f'<p class="note">{escape(note)}</p>\n'
        for note in (*table.notes, f"Data: tables/{table.name}.csv")
    )
    rows = f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>"
    return (
        f'<h3>{escape(table.title)}</h3>\n<div class="table"><table>{rows}</table></div>\n{notes}'
    )


def _markdown(part: Part) -> list[str]:
    if isinstance(part, str):
        return [_plain(part)]
    if isinstance(part, list):
        return [f"- {_plain(item)}" for item in part]
    if isinstance(part, Picture):
        data = f"[Data](figures/{part.name}.csv), [SVG](figures/{part.name}.svg)."
        return [
            f"### {part.title}",
            "",
            f"![{part.title}](figures/{part.name}.png)",
            "",
            f"{_plain(part.caption)} {data}",
        ]
    rule = [
        "---" if any(_is_text(row[column]) for row in part.rows) else "---:"
        for column in range(len(part.columns))
    ]
    lines = [
        _line(part.columns),
        _line(rule),
        *(_line(tuple(map(_plain, row))) for row in part.rows),
    ]
    return [
        f"### {part.title}",
        "",
        *lines,
        "",
        *(f"{_plain(note)}\n" for note in part.notes),
        f"[Data](tables/{part.name}.csv)",
    ]


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Text with the signs escaped that have a meaning in Markdown."""
    return "".join("\\" + letter if letter in "\\|*_<`" else letter for letter in text)


def _is_text(cell: str) -> bool:
    """Whether a cell is aligned to the left; numbers, lists of them and gaps are not."""
    return cell not in ("full", "missing") and any(letter.isalpha() for letter in cell)
