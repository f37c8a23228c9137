"""Transformer Engine's real Python package without its compiled module: enough to construct, not to run.

Where the compiled module is present nothing is replaced.
"""

import contextlib
import enum
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock, patch

import torch

COMPILED = "transformer_engine_torch"


def missing() -> str | None:
    """Why the contract cannot be tested here; None where it can."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "transformer-engine is not installed (docs/gpu.md says which packages do)"
    return None


def install() -> None:
    """Import Transformer Engine, its compiled module replaced where it is absent."""
    if importlib.util.find_spec(COMPILED) is not None:
        import transformer_engine.pytorch  # pyright: ignore[reportMissingImports]

        return
    os.environ.setdefault("NVTE_PROJECT_BUILDING", "1")  # the package then loads no shared library
    import torch._dynamo
    import torch._inductor.utils  # noqa: F401 - before the false triton: torch must see that there is none

    fakes = {} if importlib.util.find_spec("triton") else _triton()
    sys.modules.update(fakes)
    sys.modules[COMPILED] = _compiled_module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        import transformer_engine.common as common  # pyright: ignore[reportMissingImports]

        common.load_framework_extension = lambda framework: None
        import transformer_engine.pytorch  # noqa: F401  # pyright: ignore[reportMissingImports]
    for name in fakes:
        del sys.modules[name]


def _answer_anything(module: types.ModuleType) -> types.ModuleType:
    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{module.__name__}.{name}")
        setattr(module, name, value)
        return value

    module.__getattr__ = attribute  # type: ignore[method-assign]
    return module


def _triton() -> dict[str, types.ModuleType]:
    names = ("triton", "triton.language", "triton.language.core", "triton.language.standard")
    modules = {name: _answer_anything(types.ModuleType(name)) for name in names}
    root, language = modules["triton"], modules["triton.language"]

    def decorate(*arguments: Any, **options: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not options else lambda one: one

    for name in ("jit", "autotune", "heuristics"):
        setattr(root, name, decorate)
    root.__version__ = "3.0.0"  # type: ignore[attr-defined]
    root.__path__ = language.__path__ = []  # type: ignore[attr-defined]
    root.language = language  # type: ignore[attr-defined]
    language.core, language.standard = modules["triton.language.core"], modules["triton.language.standard"]  # type: ignore[attr-defined]
    return modules


def _compiled_module() -> types.ModuleType:
    module = types.ModuleType(COMPILED)
    enums = {
        "DType": {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6}
        | {"kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10},
        "FP8FwdTensors": {
            f"GEMM{number}_{kind}": 3 * (number - 1) + place
            for number in (1, 2, 3)
            for place, kind in enumerate(("INPUT", "WEIGHT", "OUTPUT"))
        },
        "FP8BwdTensors": {
            f"GRAD_{kind}{number}": 2 * (number - 1) + place
            for number in (1, 2, 3)
            for place, kind in enumerate(("OUTPUT", "INPUT"))
        },
        "Float8BlockScaleTensorFormat": {"GEMM_READY": 0, "COMPACT": 1},
        "CommOverlapType": {"RS": 0, "AG": 1},
    }
    for name, members in enums.items():
        setattr(module, name, enum.IntEnum(name, members))
    module.FP8TensorMeta = type("FP8TensorMeta", (), {})  # type: ignore[attr-defined]
    module.get_cudnn_version = lambda: 92400  # type: ignore[attr-defined]
    module.get_num_cublas_streams = lambda: 4  # type: ignore[attr-defined]
    module.get_cublasLt_version = lambda: 130101  # type: ignore[attr-defined]
    return _answer_anything(module)


@contextlib.contextmanager
def seeming_gpu() -> Iterator[None]:
    """While modules are constructed: torch says that a GPU is there; nothing runs on it."""
    if torch.cuda.is_available():
        yield
        return
    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="none", total_memory=1 << 36)
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        patch.object(torch.cuda, "device_count", lambda: 1),
    ):
        yield
