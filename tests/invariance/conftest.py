"""The launches that the parity suite shares, and its table of measured deviations."""

from functools import cache
from pathlib import Path

import pytest
from deviations import QUANTITIES, Outcome, as_outcome
from matrix import CONTROLS, MODELS, PARITY
from safetensors.torch import load_file
from suite import DIVERGENCES, REPLAYS, TABLE, Suite, step_of
from toy_step import make_model, reference_update

WORKER = Path(__file__).with_name("layout_worker.py")


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory, launch, request: pytest.FixtureRequest) -> Suite:
    """Run every case, in one launch for each number of processes."""
    root = tmp_path_factory.mktemp("parity")
    for name, arguments in MODELS.items():
        make_model(root / name, **arguments)
    cases = PARITY | CONTROLS
    for num_processes in sorted({case.num_processes for case in cases.values()}):
        names = [case.name for case in cases.values() if case.num_processes == num_processes]
        # Half a second to three a case on a quiet machine.
        launch(WORKER, root, root, *names, num_processes=num_processes, timeout_seconds=60 + 30 * len(names))

    @cache
    def plain(model: str, setting: str) -> Outcome:
        updates = (
            reference_update(
                root / model,
                step_of(setting),
                num_steps=number,
                kl_coefficient=0.05,
                recipe=setting == "recipe",
            )
            for number in (1, 2)
        )
        return as_outcome(*updates)

    suite = Suite({name: load_file(root / f"{name}.safetensors") for name in cases}, plain)
    request.config.stash[TABLE] = {
        name: (suite.from_plain_torch(case), suite.from_one_process(case)) for name, case in cases.items()
    }
    return suite


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the measured deviations of every configuration, after a run that made them."""
    if table := config.stash.get(TABLE, None):
        terminalreporter.section("largest deviation from float64 torch | from one process")
        header = "".join(f"{name:>10}" for name in QUANTITIES)
        terminalreporter.write_line(f"{'configuration':45}{header}   | all")
        for name, (plain, one) in table.items():
            values = "".join(f"{value:10.1e}" for value in plain.values)
            terminalreporter.write_line(f"{name:45}{values}   | {one.largest:.1e}")
    for layout, deviations in config.stash.get(REPLAYS, {}).items():
        terminalreporter.write_line(f"replay of five steps on {layout}: {', '.join(deviations)}")
    for layout, divergence in config.stash.get(DIVERGENCES, {}).items():
        terminalreporter.write_line(f"first divergence of a free run on {layout}: {divergence}")
