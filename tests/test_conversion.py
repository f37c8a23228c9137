"""Conversions in one process: layouts, damage, interruption, memory. Logits are in parallel/test_families.py."""

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dppo_megatron import conversion
from dppo_megatron.conversion import MANIFEST, Model, convert_to_hf, convert_to_megatron, verify
from dppo_megatron.parallel.sharded_files import TargetLayout
from tools.benchmarks.conversion import measure
from tools.make_random_checkpoint import make_random_checkpoint

LAYOUTS = {
    "torch_dist": None,
    "tp2": TargetLayout(tp=2),
    "pp2": TargetLayout(pp=2),
    "tp2_pp2": TargetLayout(tp=2, pp=2),
    "pp2_virtual2": TargetLayout(pp=2, virtual_pp=2),
}
CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def silent(done: int, total: int) -> None:
    """No progress bar."""


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, written down by hand."""
    layer = {
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
        "self_attn.q_proj.weight": (32, 32),
        "self_attn.k_proj.weight": (16, 32),
        "self_attn.v_proj.weight": (16, 32),
        "self_attn.q_proj.bias": (32,),
        "self_attn.k_proj.bias": (16,),
        "self_attn.v_proj.bias": (16,),
        "self_attn.o_proj.weight": (32, 32),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    every = {f"model.layers.{number}.{name}": shape for number in range(4) for name, shape in layer.items()}
    return every | {"model.embed_tokens.weight": (61, 32), "model.norm.weight": (32,)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model in two files with an index, in bfloat16 but for its norms."""
    directory = tmp_path / "source"
    directory.mkdir()
    stream = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=stream).to(torch.float32 if "norm" in name else torch.bfloat16)
        for name, shape in shapes().items()
    }
    halves = {"model-1.safetensors": dict(list(tensors.items())[:20])}
    halves["model-2.safetensors"] = dict(list(tensors.items())[20:])
    for file, part in halves.items():
        save_file(part, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in halves.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    return directory


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face directory."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_equal_weights(one: Path, other: Path) -> None:
    """Same names, types and values."""
    left, right = weights_of(one), weights_of(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert right[name].dtype == tensor.dtype
        assert torch.equal(right[name], tensor), name


@pytest.mark.parametrize("name", LAYOUTS)
def test_there_and_back_is_bit_identical_and_verified(name: str, source: Path, tmp_path: Path) -> None:
    model = Model.open(source)
    convert_to_megatron(model, tmp_path / "megatron", layout=LAYOUTS[name], progress=silent)
    verify(model, tmp_path / "megatron", progress=silent)
    converted = Model.open(tmp_path / "megatron")
    convert_to_hf(converted, tmp_path / "back", progress=silent, shard_bytes=8192)
    verify(converted, tmp_path / "back", progress=silent)
    assert_equal_weights(tmp_path / "back", source)
    for file in ("config.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (source / file).read_bytes()
    manifest = json.loads((tmp_path / "back" / MANIFEST).read_text())["files"]
    assert manifest.keys() == {path.name for path in (tmp_path / "back").iterdir()} - {MANIFEST}


def test_a_shard_holds_what_megatron_core_names_and_cuts(source: Path, tmp_path: Path) -> None:
    layout = TargetLayout(tp=2, pp=2, virtual_pp=2)
    convert_to_megatron(Model.open(source), tmp_path / "out", layout=layout, progress=silent)
    weights = weights_of(source)
    # Layer 1 is alone in the first chunk of stage 1: chunks go round the stages.
    shard = load_file(tmp_path / "out" / "policy" / "tp1_pp1_virtual0.safetensors")
    prefix = "model.layers.1.self_attn"
    expected = torch.cat([weights[f"{prefix}.{part}_proj.bias"].chunk(2)[1] for part in "qkv"])
    assert torch.equal(shard["decoder.layers.0.self_attention.linear_qkv.bias"], expected)
    gate, up = (weights[f"model.layers.1.mlp.{part}_proj.weight"][24:] for part in ("gate", "up"))
    assert torch.equal(shard["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([gate, up]))
    down = weights["model.layers.1.mlp.down_proj.weight"][:, 24:]
    assert torch.equal(shard["decoder.layers.0.mlp.linear_fc2.weight"], down)
    # The last chunk of a tied model: its copy of the embedding, 61 rows padded to 62.
    last = load_file(tmp_path / "out" / "policy" / "tp1_pp1_virtual1.safetensors")["output_layer.weight"]
    assert torch.equal(last[:30], weights["model.embed_tokens.weight"][31:])
    assert torch.equal(last[30], torch.zeros(32, dtype=torch.bfloat16))


def remove_tensor(directory: Path) -> None:
    path = directory / "model-2.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    rewrite(directory, path, tensors)


def add_tensor(directory: Path) -> None:
    path = directory / "model-2.safetensors"
    rewrite(directory, path, load_file(path) | {"model.layers.9.mlp.up_proj.weight": torch.zeros(3)})


def reshape_tensor(directory: Path) -> None:
    path = directory / "model-2.safetensors"
    rewrite(directory, path, load_file(path) | {"model.norm.weight": torch.zeros(31)})


def retype_tensor(directory: Path) -> None:
    path = directory / "model-2.safetensors"
    rewrite(directory, path, load_file(path) | {"model.norm.weight": torch.zeros(32, dtype=torch.int8)})


def untie(directory: Path) -> None:
    path = directory / "model-2.safetensors"
    rewrite(directory, path, load_file(path) | {"lm_head.weight": torch.zeros(61, 32, dtype=torch.bfloat16)})


def rewrite(directory: Path, path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path)
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    kept = {name: file for name, file in weight_map.items() if file != path.name}
    index.write_text(json.dumps({"weight_map": kept | dict.fromkeys(tensors, path.name)}))


def truncate(directory: Path) -> None:
    path = directory / "model-2.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def lose_file(directory: Path) -> None:
    (directory / "model-2.safetensors").unlink()


def break_index(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model.norm.weight", "model.norm.wait"))


def leave_pickle(directory: Path) -> None:
    for path in [*directory.glob("*.safetensors"), directory / "model.safetensors.index.json"]:
        path.unlink()
    torch.save({}, directory / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_tensor, r"holds no tensor model\.norm\.weight"),
        (add_tensor, r"no known place: model\.layers\.9\.mlp\.up_proj\.weight"),
        (reshape_tensor, r"model\.norm\.weight .* has shape \(31,\); config\.json gives \(32,\)"),
        (retype_tensor, r"model\.norm\.weight have type I8"),
        (untie, r"lm_head\.weight is not"),
        (truncate, r"model-2\.safetensors is truncated"),
        (lose_file, r"names model-2\.safetensors, and there is no such file"),
        (break_index, r"disagree on model\.norm\.wait, model\.norm\.weight"),
        (leave_pickle, r"--allow-pickle"),
    ],
)
def test_damage_is_named_and_leaves_no_target(damage: Any, message: str, source: Path, tmp_path: Path) -> None:
    damage(source)
    with pytest.raises(ValueError, match=message):
        convert_to_megatron(Model.open(source), tmp_path / "out", layout=None, progress=silent)
    assert not (tmp_path / "out").exists()


def test_pickle_files_are_read_when_allowed_and_run_no_code(source: Path, tmp_path: Path) -> None:
    weights = weights_of(source)
    leave_pickle(source)
    torch.save(weights, source / "pytorch_model.bin")
    convert_to_megatron(Model.open(source, allow_pickle=True), tmp_path / "out", layout=None, progress=silent)
    convert_to_hf(Model.open(tmp_path / "out"), tmp_path / "back", progress=silent)
    back = weights_of(tmp_path / "back")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())
    torch.save({"model.norm.weight": Path("/")}, source / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        Model.open(source, allow_pickle=True)


def test_nan_is_warned_of_by_name_and_kept(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = source / "model-2.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, path)
    model = Model.open(source)
    with caplog.at_level(logging.WARNING):
        convert_to_megatron(model, tmp_path / "out", layout=None, progress=silent)
    assert [record.getMessage() for record in caplog.records] == [
        "decoder.final_layernorm.weight holds values that are NaN or infinite"
    ]
    verify(model, tmp_path / "out", progress=silent)


def test_verification_finds_one_flipped_bit(source: Path, tmp_path: Path) -> None:
    model = Model.open(source)
    convert_to_megatron(model, tmp_path / "out", layout=LAYOUTS["tp2"], progress=silent)
    path = tmp_path / "out" / "policy" / "tp1_pp0.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"tp1_pp0\.safetensors is not what was written"):
        verify(model, tmp_path / "out", progress=silent)
    manifest = tmp_path / "out" / MANIFEST
    content = json.loads(manifest.read_text())
    content["files"]["policy/tp1_pp0.safetensors"]["sha256"] = conversion.hash_file(path).sha256
    manifest.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"differs from the source's"):
        verify(model, tmp_path / "out", progress=silent)


def test_a_disk_too_small_is_said_before_a_byte_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"are still to write and 0\.0 GB are free"):
        convert_to_megatron(Model.open(source), tmp_path / "out", layout=None, progress=silent)
    assert not (tmp_path / "out").exists()


TOOL = Path(__file__).parents[1] / "tools" / "convert_hf_to_megatron.py"


def start(source: Path, target: Path, *more: str, limit: int | None = None) -> subprocess.Popen[str]:
    """Start the tool; ``limit``: bytes after which no file may grow, as on a full disk."""

    def prepare() -> None:
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.Popen(
        [sys.executable, str(TOOL), str(source), str(target), *more],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
    )


def test_a_file_that_cannot_grow_is_an_error_and_a_killed_conversion_resumes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "out"
    make_random_checkpoint(source, size="100m", shard_bytes=2**28)
    process = start(source, target, limit=2**20)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "error: [Errno 27] File too large" in errors
    assert not target.exists()
    layout = ("--pp", "4")
    process = start(source, target, *layout)
    incomplete = tmp_path / ".out.incomplete"
    first = incomplete / "policy" / "tp0_pp0.safetensors"
    while process.poll() is None and not (incomplete / "journal.json").exists():
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert not target.exists()
    written = first.stat().st_mtime_ns
    process = start(source, target, *layout, "--verify")
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert (target / "policy" / "tp0_pp0.safetensors").stat().st_mtime_ns == written
    assert not incomplete.exists()
    convert_to_hf(Model.open(target), tmp_path / "back", progress=silent)
    assert_equal_weights(tmp_path / "back", source)


def test_a_conversion_holds_a_fraction_of_the_model_in_memory(tmp_path: Path) -> None:
    total = make_random_checkpoint(tmp_path / "source", size="100m", shard_bytes=2**28)
    source, target, back = (tmp_path / name for name in ("source", "out", "back"))
    there = measure(lambda: convert_to_megatron(Model.open(source), target, layout=None, progress=silent))
    again = measure(lambda: convert_to_hf(Model.open(target), back, progress=silent))
    # The embedding is 67 MB of 229; it and one block of it may be held.
    assert total > 200e6
    assert there.peak_bytes < 0.75 * total
    assert again.peak_bytes < 0.75 * total
