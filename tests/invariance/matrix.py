"""The configurations of the parity suite: models x layouts x precision, and the controls that must fail."""

from dataclasses import dataclass
from typing import Any, Literal

from toy_step import megatron_config

from dppo_megatron.config.schema import MegatronConfig

Deal = Literal["evenly", "first_rank", "single_token", "full_row"]

MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "untied": {"tied": False},
    "one_kv_head": {"tied": True, "num_key_value_heads": 1},
    "deep_tied": {"tied": True, "num_layers": 4},
    "deep_untied": {"tied": False, "num_layers": 4},
}
"""Arguments of ``make_model``. All have 61 tokens, which no TP divides, and heads wider than hidden / heads."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2_sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {}),
    "dp2_overlap": (2, {"overlap": True}),
    "dp2_sharded": (2, {"sharded": True}),
    "dp2_sharded_overlap": (2, {"sharded": True, "overlap": True}),
    "tp4_sp": (4, {"tp": 4, "sp": True}),
    "tp2_pp2_sp": (4, {"tp": 2, "pp": 2, "sp": True}),
    "tp2_cp2_sp": (4, {"tp": 2, "cp": 2, "sp": True}),
    "tp2_dp2": (4, {"tp": 2}),
    "pp2_dp2_sharded": (4, {"pp": 2, "sharded": True}),
    "tp2_dp2_sharded_overlap": (4, {"tp": 2, "sharded": True, "overlap": True}),
}
INTERLEAVED: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2_virtual2": (2, {"pp": 2}),
    "tp2_pp2_virtual2_sp": (4, {"tp": 2, "pp": 2, "sp": True}),
    "pp2_virtual2_dp2_sharded_overlap": (4, {"pp": 2, "sharded": True, "overlap": True}),
}
"""The same, of two virtual stages a pipeline stage: they need models of four layers."""
"""Number of processes and arguments of ``megatron_config``; data parallelism takes what is left."""


@dataclass(frozen=True)
class Case:
    """One configuration to run. breakage: the protection that is removed, of ``breakages.BREAKAGES``.

    deal: which sequences the ranks train: evenly; all on the first data-parallel rank; all but one completion of
    one token there; or packed by the planner, one prompt being far longer than the rest and its row full.
    """

    name: str
    model: str
    layout: str
    num_processes: int
    megatron: MegatronConfig
    breakage: str | None = None
    deal: Deal = "evenly"
    virtual_pp: int = 1

    @property
    def setting(self) -> str:
        """What its reference must share: float32, recipe or bfloat16, or the step with a long prompt."""
        if self.megatron.pipeline_dtype == "bfloat16":
            return "bfloat16"
        if self.deal == "full_row":
            return "long"
        return "recipe" if "recipe" in self.name else "float32"


def _case(
    model: str, layout: str, suffix: str = "", *, breakage: str | None = None, deal: Deal = "evenly", **more: Any
) -> Case:
    num_processes, arguments = (LAYOUTS | INTERLEAVED)[layout]
    name = "-".join(part for part in (model, layout, suffix) if part)
    virtual_pp = 2 if layout in INTERLEAVED else 1
    return Case(name, model, layout, num_processes, megatron_config(**arguments, **more), breakage, deal, virtual_pp)


def _parity_cases() -> list[Case]:
    cases = [_case("tied", layout) for layout in LAYOUTS]
    cases += [_case("untied", layout) for layout in LAYOUTS if "overlap" not in layout and "dp2" not in layout[4:]]
    # Under the default rate and epsilon: gradients and moments of both steps.
    some = ("one", "tp2_sp", "pp2", "cp2", "dp2", "dp2_sharded_overlap", "tp2_pp2_sp", "pp2_dp2_sharded")
    cases += [_case("tied", layout, "recipe", recipe=True) for layout in some]
    cases += [_case("untied", layout, "bfloat16", bfloat16=True) for layout in some]
    # Interleaved pipeline stages.
    cases += [_case("deep_tied", layout) for layout in ("one", *INTERLEAVED)]
    cases += [_case("deep_untied", layout) for layout in ("one", "pp2_virtual2", "tp2_pp2_virtual2_sp")]
    cases += [_case("deep_untied", layout, "bfloat16", bfloat16=True) for layout in ("one", "pp2_virtual2")]
    cases += [_case("deep_tied", "pp2_virtual2", "recompute_full", recompute="full")]
    # One key-value head for two and four tensor-parallel ranks.
    cases += [_case("one_kv_head", layout) for layout in ("one", "tp2_sp", "tp4_sp")]
    for recompute in ("full", "selective"):
        again = ("one", "tp2_sp", "pp2", "cp2")
        cases += [_case("tied", layout, f"recompute_{recompute}", recompute=recompute) for layout in again]
    for layout in ("dp2", "dp2_sharded_overlap", "pp2_dp2_sharded"):
        cases.append(_case("tied", layout, "rank_without_sequences", deal="first_rank"))
        cases.append(_case("tied", layout, "rank_with_one_token", deal="single_token"))
    cases += [_case("tied", layout, "long", deal="full_row") for layout in ("one", "tp2_sp", "cp2", "dp2")]
    return cases


PARITY = {case.name: case for case in _parity_cases()}

CONTROLS = {
    case.name: case
    for case in (
        _case("tied", "tp2_sp", "without_sequence_parallel_mark", breakage="sequence_parallel_mark"),
        _case("tied", "cp2", "labels_shifted_after_the_cut", breakage="label_shift"),
        _case("tied", "dp2", "denominator_of_each_rank", breakage="denominator"),
        _case("tied", "one", "mean_per_micro_batch", breakage="micro_batch_mean"),
        _case("tied", "dp2", "without_finalize", breakage="finalize"),
        _case("tied", "pp2", "without_finalize", breakage="finalize"),
        _case("deep_tied", "pp2_virtual2", "without_finalize", breakage="finalize"),
        _case("tied", "tp2_sp", "without_finalize", breakage="finalize"),
        _case("untied", "tp2", "padding_rows_in_the_softmax", breakage="vocabulary"),
    )
}

STREAM_MEASURED = {"tied-tp2": 2, "tied-pp2": 1, "tied-tp2_pp2_sp": 2, "deep_tied-pp2_virtual2": 1}
"""Cases whose stream's memory is measured, and their TP."""
BUCKET_BYTES = 2**13
