"""Load exported models in vLLM as any user would, one after the other, and write what each generates.

argv: a file to write, then the models' directories.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from family_models import LENGTHS, token_ids

NUM_TOKENS = 8


def generate(directory: Path) -> dict[str, Any]:
    """Greedy continuations of two prompts, and the chat template that came with the model."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(
        str(directory), dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=2**24, seed=0
    )
    prompts = [{"prompt_token_ids": ids.tolist()} for ids in token_ids().split(LENGTHS)]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    outputs = engine.generate(prompts, greedy, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "chat_template": engine.get_tokenizer().chat_template,
    }


def main() -> None:
    """Run the command line."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    found = {}
    for directory in map(Path, sys.argv[2:]):
        found[directory.name] = generate(directory)
        gc.collect()
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
