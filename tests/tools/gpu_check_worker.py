"""Compares plain torch with itself by the GPU check's functions. argv: directory for models and found.json."""

import json
import sys
from dataclasses import astuple
from pathlib import Path

from dppo_megatron.config.fp8 import Fp8Config
from tools.gpu_check import Arm, Sizes, compare_layers, difference, make_model, make_rows, measure

SIZES = Sizes(hidden_size=128, num_layers=2, num_sequences=8, capacity=512)


def main() -> None:
    """Write the differences and the rows."""
    output = Path(sys.argv[1])
    model, rows = output / "model", make_rows(SIZES)
    make_model(model, SIZES)
    plain = measure(model, rows, Arm(precision="float32", local=True))
    fp8 = Fp8Config(enabled=True, fp8_recipe="blockwise")
    found = {
        "same": difference(measure(model, rows, Arm(precision="float32", local=True)), plain).gradients,
        "bfloat16": difference(measure(model, rows, Arm(local=True)), plain).gradients,
        "blockwise": difference(
            measure(model, rows, Arm(precision="float32", local=True, fp8=fp8, rehearsed=True)), plain
        ).gradients,
    }
    compared = compare_layers(model, rows, why_not=lambda _: "no such device")
    text = json.dumps({**found, "rows": [astuple(row) for row in compared]})
    (output / "found.json").write_text(text)


if __name__ == "__main__":
    main()
