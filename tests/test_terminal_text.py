"""What others wrote moves no cursor."""

import pytest

from dppo_megatron.terminal_text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("right\r\x1b[2Kwrong", "right\\x0d\\x1b[2Kwrong"),
        ("\x9b31m \u202egnorw \ud800 \x7f", "\\x9b31m \\u202egnorw \\ud800 \\x7f"),
    ],
)
def test_control_characters_are_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_what_people_write_stays() -> None:
    text = "\tdéjà vu\n数学 ∑ 👩‍🔬 \u00a0[red]{0}$(x)"
    assert printable(text) == text
