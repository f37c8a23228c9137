"""A reward function of the user's own, called in worker processes: it may hang, crash or return anything."""

import importlib
import math
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

from dppo_megatron.rl.worker_pool import Answer


def prepare_worker(path: str) -> Answer:
    """What a worker answers (prompt, completion, answer) requests with: a number, or a failure's kind and words.

    path: ``module:function``. Raises ValueError where it cannot be imported or called.
    """
    return partial(_score, import_function(path))


def import_function(path: str) -> Callable[[str, str, str], Any]:
    """Import ``module:function``, from the working directory too. Raises ValueError where it cannot be had."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"dppo.reward.function is {path!r}; a function of your own is module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a file there shadows no installed package
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"dppo.reward.function is {path!r}; importing {module_name} failed: {error}; "
            f"it must be installed or stand in {os.getcwd()}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        problem = "is not callable" if hasattr(module, attribute) else "does not exist"
        raise ValueError(f"dppo.reward.function is {path!r}; {attribute} {problem} in {module.__file__}")
    return function


def _score(function: Callable[[str, str, str], Any], request: list[str]) -> float | list[str]:
    try:
        value = function(*request)
    except Exception as error:  # noqa: BLE001 - anything may come out of a user's function
        name = type(error).__name__
        return [name, f"{name}: {error}", traceback.format_exc()]
    # numpy's truth values are no numbers to Python, and numpy need not be here.
    is_number = isinstance(value, Real) or (type(value).__module__ == "numpy" and type(value).__name__ == "bool")
    if is_number and math.isfinite(value):
        return float(value)
    return [f"result {type(value).__name__}", f"it returned {value!r:.200}, not a finite number", ""]
