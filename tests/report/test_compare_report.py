import pytest

from dppo_megatron.report.compare_report import comparison_page, comparison_text
from dppo_megatron.report.comparison import Comparison, compare
from dppo_megatron.report.run_data import read_run
from tests.report.run_directories import write_run


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    root = tmp_path_factory.mktemp("runs")
    slow = write_run(root / "slow", accuracies={-1: 0.1, 9: 0.8})
    fast = write_run(root / "fast", accuracies={-1: 0.1, 4: 0.8}, seconds=1.0, tokens=400, rate=0.25)
    return compare([read_run(slow), read_run(fast)])


def test_ratios_are_the_first_run_over_the_other(comparison: Comparison) -> None:
    lines = comparison_text(comparison).splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("To 80.0%")) :]
    assert table[2].split() == ["slow", "10", "1.00x", "20.0", "1.00x", "10,000", "1.00x", "2,500", "1.00x"]
    assert table[3].split() == ["fast", "5", "2.00x", "5.0", "4.00x", "2,000", "5.00x", "500", "5.00x"]


def test_differences_stand_below(comparison: Comparison) -> None:
    assert comparison_text(comparison).splitlines()[-1].split() == ["dppo.completion_pruning.rate", "0.5", "0.25"]


def test_the_page_has_curves_over_steps_tokens_and_seconds(comparison: Comparison) -> None:
    page = comparison_page(comparison)
    for name in ("steps", "sampled and trained tokens", "training seconds"):
        assert f"Accuracy over {name}" in page
    assert page.count("<svg") >= 6
    assert "4.00x" in page
