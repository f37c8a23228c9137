"""The section ``policy.megatron_cfg.fp8_cfg``."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Fp8Config:
    """``policy.megatron_cfg.fp8_cfg``: training in FP8, by Transformer Engine on a GPU.

    first_last_layers_bf16: the first and last layers (how many: num_layers_at_start_in_bf16 and ..._at_end_...) stay
    in bfloat16.
    """

    enabled: bool = False
    fp8: Literal["e4m3", "hybrid"] = "e4m3"
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "blockwise"
    fp8_param: bool = False
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1
