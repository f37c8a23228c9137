"""What needs a GPU is left out, with the reason, where there is none."""

from pathlib import Path

import pytest

from dppo_megatron import device
from tools.gpu_check import Sizes, make_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this directory's tests without a GPU."""
    if not device.has_gpu():
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 whose sizes every recipe takes."""
    directory = tmp_path_factory.mktemp("random") / "model"
    make_model(directory, Sizes())
    return directory
