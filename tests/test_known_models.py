"""Claims about the table of public models: each row is what its publisher says, as far as that shows in a count."""

import json
from importlib.resources import files

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dppo_megatron.architecture import read_architecture
from dppo_megatron.known_models import known_config
from dppo_megatron.memory import StageShape, parameters

TABLE = json.loads(files("dppo_megatron").joinpath("known_models.json").read_text(encoding="utf-8"))
TRAINED = [name for name, row in TABLE.items() if len(row) > 1]

# Parameters as the publishers' model pages count them (tied ones once); longer names begin with these.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.3-70B": 70_553_706_496,
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_model_of_the_table_has_the_published_number_of_parameters(name: str) -> None:
    row = dict(TABLE[name])
    architecture = read_architecture(row)
    (published,) = [
        count for start, count in PUBLISHED.items() if name in (start, f"{start}-Instruct", f"{start}-Base")
    ]
    whole = StageShape(architecture.num_layers, is_first=True, is_last=True, in_flight=1)
    assert sum(parameters(architecture, whole, tp=1)) == published


@pytest.mark.parametrize("name", TRAINED)
def test_a_row_means_to_transformers_what_it_means_here(name: str) -> None:
    row = dict(TABLE[name])
    config = CONFIG_MAPPING[row.pop("model_type")](**row)
    stated = config.to_dict()
    unknown = row.keys() - stated.keys() - {"rope_theta", "rope_scaling"}  # kept in rope_parameters since version 5
    assert unknown == set()
    assert read_architecture(stated) == read_architecture(TABLE[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    whole = StageShape(stated["num_hidden_layers"], is_first=True, is_last=True, in_flight=1)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert sum(parameters(read_architecture(TABLE[name]), whole, tp=1)) == count


@pytest.mark.parametrize("name", sorted(TABLE.keys() - set(TRAINED)))
def test_a_family_that_is_not_trained_is_refused_by_a_name_that_transformers_knows(name: str) -> None:
    known = known_config(name)
    assert known is not None
    assert known[0]["model_type"] in CONFIG_MAPPING
    with pytest.raises(ValueError, match=known[0]["model_type"]):
        read_architecture(known[0])
