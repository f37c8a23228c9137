"""A table of texts with a title."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of texts: headings, and rows of as many cells."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        """Aligned columns under the title."""
        cells = [self.headings, *self.rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.headings))]
        lines = [
            "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(pairs))
            for pairs in (list(zip(row, widths, strict=True)) for row in cells)
        ]
        return "\n".join([self.title, *lines])
