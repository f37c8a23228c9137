"""The contract with Transformer Engine: its real Python package, its compiled module replaced where it is absent.

Names, shapes, weights and recipes; nothing runs forward.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import te_stub
from toy_step import make_model

WORKER = Path(__file__).with_name("te_worker.py")


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory, launch) -> dict[str, Any]:
    if (reason := te_stub.missing()) is not None:
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("te")
    make_model(root / "model", tied=False)
    launch(WORKER, root / "model", root / "contract.json", num_processes=1)
    return json.loads((root / "contract.json").read_text())


@pytest.mark.parametrize("tp", [1, 2])
def test_every_parameter_of_the_real_spec_is_the_table_s_in_name_and_shape(tp: int, contract: dict[str, Any]) -> None:
    model, renamed = contract[f"tp{tp}"]["model"], contract["renamed"]
    assert {renamed[name]: shape for name, shape in model.items()} == contract[f"tp{tp}"]["table"]
    fused = [name for name in model if name.endswith("layer_norm_weight")]
    assert len(fused) == 4, "two layers of two fused norms"
    assert len(contract[f"tp{tp}"]["attention"]) == 2


def test_weights_loaded_through_the_fused_names_come_back_bit_for_bit(contract: dict[str, Any]) -> None:
    assert contract["differing"] == []


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ("delayed", "DelayedScaling"),
        ("tensorwise", "Float8CurrentScaling"),
        ("blockwise", "Float8BlockScaling"),
        ("mxfp8", "MXFP8BlockScaling"),
    ],
)
@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
def test_a_section_becomes_the_recipe_that_it_names(
    recipe: str, kind: str, fp8: str, contract: dict[str, Any]
) -> None:
    found = contract["recipes"][f"{recipe} {fp8}"]
    assert kind in found["bases"]
    assert found["format"] == fp8.upper()
    assert found["fp8_param"] == (fp8 == "e4m3")
    assert found["bf16"] == []


def test_first_and_last_layers_stay_in_bfloat16(contract: dict[str, Any]) -> None:
    assert contract["ends"]["bf16"] == [0, 1, 5]
