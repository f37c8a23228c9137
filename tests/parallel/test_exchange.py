"""The gradient of a batch is the same however its sequences are packed, ordered and shared."""

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from toy_step import make_model, make_step

from dppo_megatron.config.schema import SequencePackingConfig

WORKER = Path(__file__).with_name("packing_worker.py")
ALGORITHMS = get_args(get_type_hints(SequencePackingConfig)["algorithm"])
PACKINGS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name, "capacity": 48} for name in ALGORITHMS},
    **{f"window_{size}": {"algorithm": "window_greedy", "window": size, "capacity": 40} for size in (1, 3, 64)},
    "one_row": {"algorithm": "concatenative", "capacity": 1000},
    "shuffled": {"algorithm": "best_fit_decreasing", "capacity": 48, "shuffle": True},
    "padded_rows": {"algorithm": "best_fit_decreasing", "capacity": 64, "row_multiple": 16},
    "small_logprob_rows": {"algorithm": "best_fit_decreasing", "capacity": 64, "logprob_capacity": 24},
    "large_logprob_rows": {"algorithm": "window_greedy", "capacity": 32, "logprob_capacity": 500, "shuffle": True},
}
SHARED = {f"{layout}_{name}": packing for layout in ("dp2", "cp2") for name, packing in PACKINGS.items()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, launch) -> dict[str, dict[str, Tensor]]:
    """Gradients, loss and count of tokens by packing; ``alone`` has the smallest rows, on one process."""
    root = tmp_path_factory.mktemp("packings")
    make_model(root / "model", tied=True)
    longest = int(make_step().plan.lengths.max())
    alone = {"alone": {"algorithm": "window_greedy", "window": 1, "capacity": longest}}
    launch(WORKER, root / "model", root, "1", json.dumps(alone | PACKINGS), num_processes=1)
    for layout, cp in (("dp2", 1), ("cp2", 2)):
        packings = {name: packing for name, packing in SHARED.items() if name.startswith(layout)}
        launch(WORKER, root / "model", root, str(cp), json.dumps(packings), num_processes=2)
    return {path.stem: load_file(path) for path in root.glob("*.safetensors")}


@pytest.mark.parametrize("name", [*PACKINGS, *SHARED])
def test_the_gradient_does_not_depend_on_packing_window_order_or_ranks(
    name: str, outcomes: dict[str, dict[str, Tensor]]
) -> None:
    alone, ours = outcomes["alone"], outcomes[name]
    assert int(ours["tokens"]) == int(alone["tokens"]) == make_step().plan.completion_lengths.sum()
    assert ours.keys() == alone.keys()
    for key, expected in alone.items():
        error = (ours[key] - expected).abs().max() / expected.abs().max()
        assert torch.isfinite(error), key
        assert error < 1e-5, key
