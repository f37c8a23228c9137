"""Make the README's pictures from a real run: the live table as SVG, the top of the report as PNG.

dppo train examples/quickstart.yaml logger.log_dir=results/quickstart
python tools/pictures.py results/quickstart docs [--step 110]

The table is the one that a terminal of 80 columns showed after that step, drawn from the run's log. The report needs
Chromium (Debian's package chromium).
"""

import argparse
import io
import re
import shutil
import subprocess
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console

from dppo_megatron.report.run_data import read_run
from dppo_megatron.report.run_report import write_report
from dppo_megatron.run_console import LiveConsole

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def draw_live_table(run: Path, output: Path, *, step: int) -> None:
    """Write what a terminal showed after ``step`` steps. Raises ValueError where the run took fewer."""
    data = read_run(run)
    if not 0 < step <= len(data.steps):
        raise ValueError(f"--step {step}: {run} has {len(data.steps)} steps")
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80, height=40, record=True)
    live = LiveConsole(terminal, num_steps=data.num_steps or len(data.steps))
    for record in data.steps[:step]:
        terminal.export_text(clear=True)  # so that the last picture alone is kept
        live.step(record)
    # rich's template loads fonts from the network; without them the reader's own monospaced one is used.
    template = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    picture = terminal.export_svg(title="dppo train examples/quickstart.yaml", code_format=template)
    output.write_text(picture, encoding="utf-8")
    live.close()


def photograph_report(run: Path, output: Path, *, height: int) -> None:
    """Write the first ``height`` pixels of the run's report. Raises ValueError where there is no browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise ValueError(f"the report's picture needs one of {', '.join(BROWSERS)}")
    page = write_report(run).resolve().as_uri()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]
    command = [browser, *flags, f"--window-size=1200,{height}", f"--screenshot={output.resolve()}", page]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's directory")
    parser.add_argument("output", type=Path, help="directory for live-table.svg and report.png")
    parser.add_argument("--step", type=int, default=110, help="of the live table")
    parser.add_argument("--height", type=int, default=1000, help="of the report's picture, pixels")
    options = parser.parse_args()
    draw_live_table(options.run, options.output / "live-table.svg", step=options.step)
    photograph_report(options.run, options.output / "report.png", height=options.height)


if __name__ == "__main__":
    main()
