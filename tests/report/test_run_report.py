"""The report of a run: what is in it, that nothing gets out of it, and how Chromium shows it."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from dppo_megatron.report.run_report import write_report
from tests.report.run_directories import HOSTILE, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("run") / "a run", accuracies={-1: 0.1, 4: 0.5, 9: 0.8})
    return write_report(run)


class Elements(HTMLParser):
    """Tags with their attributes, and the text outside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if not self.tags or self.tags[-1][0] not in ("script", "style"):
            self.text += data + "\n"


def test_nothing_is_loaded_from_anywhere(report: Path) -> None:
    elements = Elements(report.read_text())
    for tag, attributes in elements.tags:
        assert tag not in ("img", "link", "iframe", "object", "base"), tag
        assert "src" not in attributes, tag
        if "href" in attributes:
            assert str(attributes["href"]).startswith("#")
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest", report.read_text())


def test_texts_of_a_run_stay_texts(report: Path) -> None:
    text = report.read_text()
    assert HOSTILE not in text
    assert [tag for tag, _ in Elements(text).tags].count("script") == 2  # the data and ours


def test_every_logged_metric_is_drawn_or_listed(report: Path) -> None:
    text = Elements(report.read_text()).text
    for title in ("Reward", "Validation accuracy", "Kept", "Effective sample size", "Cosine", "dppo/new"):
        assert title in text, title


def test_it_tells_the_totals_the_settings_with_their_origins_and_the_warnings(report: Path) -> None:
    text = Elements(report.read_text()).text
    assert "10.0% → 80.0%" in text
    assert "87.5%" in text  # 1 - 250 / 2000 tokens
    assert re.search(r"grpo\.seed\s+1\s+override grpo\.seed=1", text)
    assert re.search(r"grpo\.max_num_steps\s+10\s+default", text)
    assert re.search(r"warning\s+an odd thing .*\s+2\s+10", text)


def test_a_run_that_goes_on_has_a_report_too(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", accuracies={})
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:40])  # the fourth is being written
    for name in ("summary.json", "config.yaml", "messages.jsonl"):
        (run / name).unlink()
    assert "3 steps" in Elements(write_report(run).read_text()).text


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        write_report(tmp_path)


def chromium(*arguments: str) -> str:
    """Standard output of a headless Chromium."""
    assert CHROMIUM
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]
    done = subprocess.run([CHROMIUM, *flags, *arguments], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


@needs_chromium
def test_chromium_draws_the_page(report: Path, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    chromium("--window-size=1280,4000", "--force-color-profile=srgb", f"--screenshot={shot}", report.as_uri())
    with Image.open(shot) as image:
        colours = {colour: count for count, colour in image.convert("RGB").getcolors(1 << 24) or []}
    assert colours.get((0xFF, 0xFF, 0xFF), 0) > 200_000  # cards
    assert colours.get((0x2A, 0x78, 0xD6), 0) > 1500  # lines of the first colour
    assert colours.get((0xE0, 0x61, 0x2C), 0) > 100  # and of the second


def samples_shown(page: str) -> list[tuple[str, str]]:
    """Right or wrong, kept or dropped, of each completion on the page."""
    return re.findall(r'<tr class="sample"><td><span class="tag \w+">(\w+)</span> <span[^>]*>(\w+)<', page)


@needs_chromium
def test_the_sample_browser_shows_all_and_filters(report: Path, tmp_path: Path) -> None:
    page = chromium("--dump-dom", report.as_uri())
    assert sorted(samples_shown(page)) == [
        ("right", "dropped"),
        ("right", "kept"),
        ("wrong", "dropped"),
        ("wrong", "kept"),
    ]
    assert "<title>a run</title>" in page  # not "owned"
    clicks = "for (const n of ['right', 'kept']) document.querySelector(`[data-filter=${n}]`).click();"
    clicked = tmp_path / "clicked.html"
    clicked.write_text(report.read_text().replace("</body>", f"<script>{clicks}</script></body>"))
    assert samples_shown(chromium("--dump-dom", clicked.as_uri())) == [("wrong", "dropped")]
