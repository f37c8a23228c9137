"""The parts that every page of ours is made of; whatever is text is escaped here."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Section:
    """A headed part of a page; one without content is left out. body: HTML."""

    heading: str
    body: str

    @property
    def anchor(self) -> str:
        """The fragment that the navigation points at."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.heading.lower())


def page(title: str, *, subtitle: str, sections: Sequence[Section]) -> str:
    """One HTML document that loads nothing: styles and script stand in it."""
    parts = files("dppo_megatron.report")
    style, script = (parts.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    filled = [section for section in sections if section.body]
    links = "".join(f'<a href="#{one.anchor}">{escape(one.heading)}</a>' for one in filled)
    body = "".join(f'<section id="{one.anchor}"><h2>{escape(one.heading)}</h2>{one.body}</section>' for one in filled)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Whatever a completion says, nothing is fetched and no script but ours runs against another origin.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:\">"
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>"
        f'<header><h1>{escape(title)}</h1><p class="sub">{escape(subtitle)}</p></header>'
        f"<nav>{links}</nav>{body}</main><script>{script}</script></body></html>\n"
    )


def charts(figures: Sequence[str]) -> str:
    """Figures side by side, empty ones left out; empty where all are."""
    drawn = "".join(figures)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def tiles(entries: Sequence[tuple[str, str]]) -> str:
    """Large figures: (value, what it is)."""
    cells = (f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in entries)
    return f'<div class="tiles">{"".join(cells)}</div>'


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numeric: Sequence[int] = (),
    classes: Sequence[str] = (),
) -> str:
    """A table of texts; numeric: columns set flush right; classes: one a row. Empty without rows."""
    if not rows:
        return ""

    def cell(tag: str, column: int, text: str) -> str:
        kind = ' class="n"' if column in numeric else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    head = "".join(cell("th", column, text) for column, text in enumerate(headings))
    names = classes or [""] * len(rows)
    body = "".join(
        f'<tr class="{escape(name)}">'
        + "".join(cell("td", column, text) for column, text in enumerate(row))
        + "</tr>"
        for row, name in zip(rows, names, strict=True)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
