"""Text of others on a terminal: control characters would move its cursor, rename its window or hide what is said."""

import re

# All but tab and newline; C1; what turns the direction of writing round; halves of surrogate pairs.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters written out, as ``\\x1b``."""
    return _CONTROLS.sub(lambda found: _written_out(ord(found[0])), text)


def _written_out(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
