"""On one GPU: Transformer Engine's layers, its FP8 recipes, and a short run. Not run yet on any."""

from pathlib import Path

import pytest

from dppo_megatron.config.fp8 import Fp8Config
from tools.gpu_check import (
    BFLOAT16_LIMIT,
    FP8_LIMIT,
    RECIPES,
    REHEARSAL_LIMIT,
    Arm,
    Sizes,
    difference,
    make_rows,
    measure,
    run_quickstart,
    why_not,
)


def test_transformer_engine_s_layers_agree_with_plain_torch(random_model: Path) -> None:
    if reason := why_not("delayed"):
        pytest.skip(reason)
    rows = make_rows(Sizes())
    mine, plain = (measure(random_model, rows, Arm(local=local)) for local in (False, True))
    assert difference(mine, plain).gradients <= BFLOAT16_LIMIT


@pytest.mark.parametrize(("recipe", "kind"), RECIPES)
def test_a_recipe_is_near_bfloat16_and_nearer_its_rehearsal(recipe, kind, random_model: Path) -> None:
    if reason := why_not(recipe):
        pytest.skip(reason)
    rows, fp8 = make_rows(Sizes()), Fp8Config(enabled=True, fp8=kind, fp8_recipe=recipe)
    mine = measure(random_model, rows, Arm(fp8=fp8))
    assert difference(mine, measure(random_model, rows, Arm(local=True))).gradients <= FP8_LIMIT
    rehearsal = measure(random_model, rows, Arm(local=True, fp8=fp8, rehearsed=True))
    assert difference(mine, rehearsal).gradients <= REHEARSAL_LIMIT


def test_the_quickstart_trains(tmp_path: Path) -> None:
    row = run_quickstart(tmp_path, num_steps=10)
    assert row.result == "ok", row.detail
