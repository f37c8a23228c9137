"""A process that constructs models by Transformer Engine's spec and writes what they are: argv: model, output.

The output: JSON with, for TP1 and TP2, names and shapes, differences after a round trip of weights, recipes.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import te_stub
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

te_stub.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.fp8_utils import get_fp8_recipe, is_first_last_bf16_layer  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from dppo_megatron import device  # noqa: E402
from dppo_megatron.architecture import Architecture, read_architecture  # noqa: E402
from dppo_megatron.config.fp8 import Fp8Config  # noqa: E402
from dppo_megatron.config.schema import MegatronConfig  # noqa: E402
from dppo_megatron.parallel.hf_names import model_parameters, table_name  # noqa: E402
from dppo_megatron.parallel.model import transformer_config  # noqa: E402
from dppo_megatron.parallel.te_layer_spec import RotatedTeAttention, te_block_spec  # noqa: E402

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def build(architecture: Architecture, megatron: MegatronConfig) -> GPTModel:
    """The model's chunk on rank 0, constructed on the CPU."""
    config = transformer_config(architecture, megatron, precision="bfloat16", virtual_pp=1)
    config.use_cpu_initialization = True
    with te_stub.seeming_gpu(), device.megatron_calls():
        return GPTModel(
            config=config,
            transformer_layer_spec=te_block_spec(config, num_layers=architecture.num_layers),  # type: ignore[arg-type]
            vocab_size=architecture.padded_vocab_size(megatron.tensor_model_parallel_size),
            max_sequence_length=architecture.max_positions,
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="none",
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )


def described(architecture: Architecture, tp: int) -> dict[str, Any]:
    """Names and shapes of the constructed model, and of the table."""
    torch.distributed.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    with device.megatron_calls():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, create_gloo_process_groups=False)
        device.seed_random_states(1)
    model = build(architecture, MegatronConfig(tensor_model_parallel_size=tp, pipeline_dtype="bfloat16"))
    result = {
        "model": {name: list(one.shape) for name, one in model.named_parameters()},
        "table": {one.name: list(one.local_shape(tp)) for one in model_parameters(architecture, tp=tp)},
        "attention": [type(one).__name__ for one in model.modules() if isinstance(one, RotatedTeAttention)],
        "state_keys": sorted(key for key in model.state_dict() if key.endswith("_extra_state"))[:2],
    }
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return result


def round_trip(directory: Path, architecture: Architecture) -> list[str]:
    """Names of tensors that differ after loading the Hugging Face weights through the TE names and streaming them."""
    from dppo_megatron.parallel import hf_weights
    from dppo_megatron.parallel.mesh import lay_out, take_down
    from dppo_megatron.parallel.weight_source import open_source
    from dppo_megatron.plan import Layout

    device.start_process_group()
    mesh = lay_out(Layout(1, 1, 1, 1, sequence_parallel=False), seed=1)
    model: Any = build(architecture, MegatronConfig(pipeline_dtype="bfloat16"))
    stages = ((tuple(range(architecture.num_layers)),),)
    located = hf_weights.locate_parameters([model], architecture, mesh=mesh, stages=stages)
    hf_weights.load_weights(located, open_source(directory, architecture), mesh=mesh)
    theirs = load_file(directory / "model.safetensors")
    streamed = dict(hf_weights.stream_weights(located, mesh=mesh, bucket_bytes=1 << 20))
    differing = [name for name in theirs if not torch.equal(streamed[name].float(), theirs[name].bfloat16().float())]
    # The two norms of a layer have one shape: a swap would come back unharmed.
    parameters = dict(model.named_parameters())
    for layer in stages[0][0]:
        ours = parameters[f"decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight"]
        name = f"model.layers.{layer}.input_layernorm.weight"
        if not torch.equal(ours.data, theirs[name].bfloat16()):
            differing.append(f"{name} in linear_qkv")
    take_down()
    torch.distributed.destroy_process_group()
    return differing


def recipe_of(architecture: Architecture, fp8: Fp8Config) -> dict[str, Any]:
    """What megatron-core makes of a section: the recipe's class, format, and which layers stay in bfloat16."""
    megatron = MegatronConfig(fp8_cfg=fp8, pipeline_dtype="bfloat16")
    config = transformer_config(architecture, megatron, precision="bfloat16", virtual_pp=1)
    recipe: Any = get_fp8_recipe(config)
    return {
        "class": type(recipe).__mro__[0].__name__,
        "bases": [one.__name__ for one in type(recipe).__mro__],
        "format": recipe.fp8_format.name,
        "fp8_param": config.fp8_param,
        "bf16": [layer for layer in range(architecture.num_layers) if is_first_last_bf16_layer(config, layer)],
    }


def main() -> None:
    """Write everything."""
    device.install_cpu_substitutes()
    directory, output = Path(sys.argv[1]), Path(sys.argv[2])
    architecture = read_architecture(AutoConfig.from_pretrained(directory).to_dict())
    result: dict[str, Any] = {f"tp{tp}": described(architecture, tp) for tp in (1, 2)}
    result["renamed"] = {name: table_name(name) for name in result["tp1"]["model"]}
    result["differing"] = round_trip(directory, architecture)
    six = dataclasses.replace(architecture, num_layers=6)
    result["recipes"] = {
        f"{recipe} {fp8}": recipe_of(
            six, Fp8Config(enabled=True, fp8=fp8, fp8_recipe=recipe, fp8_param=fp8 == "e4m3")
        )
        for recipe in RECIPES
        for fp8 in ("e4m3", "hybrid")
    }
    ends = Fp8Config(
        enabled=True, first_last_layers_bf16=True, num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1
    )
    result["ends"] = recipe_of(six, ends)
    output.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
