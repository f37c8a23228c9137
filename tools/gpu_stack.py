"""Write the GPU stack that pip resolved: requirements/gpu.txt and what its packages require, for the tests.

pip install --dry-run --ignore-installed --report report.json torch==2.13.0 megatron-core==0.16.1 \\
  transformer-engine==2.11.0 transformer-engine-cu13==2.11.0 onnxscript vllm==0.30.0 'setuptools<81' six . \\
  && python -m tools.gpu_stack report.json

transformer-engine-torch comes as source alone: pip learns what it requires by building it, which needs torch and
CUDA. It is pinned by hand, and left out of what is checked.
"""

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILT_FROM_SOURCE = {"transformer_engine_torch": "2.11.0"}
HEAD = """\
# The GPU stack as one set, for CUDA 13, Linux on x86-64, Python 3.11 and 3.12:
#   pip install torch==2.13.0 --constraint requirements/gpu.txt
#   NVTE_FRAMEWORK=pytorch pip install --no-build-isolation '.[gpu,vllm]' --constraint requirements/gpu.txt
# Resolved by pip from metadata alone and checked by tests/test_gpu_stack.py; never installed nor run by us. Apex is
# not needed: Transformer Engine brings the fused optimizer. Made by tools/gpu_stack.py, which says how.
"""


def main() -> None:
    """Read pip's report, write both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path, help="of pip install --dry-run --report")
    installs = json.loads(parser.parse_args().report.read_text())["install"]
    found = {}
    for one in sorted((install["metadata"] for install in installs), key=lambda one: one["name"].lower()):
        if one["name"] != "dppo_megatron":
            found[one["name"]] = {
                "version": one["version"],
                "requires_python": one.get("requires_python", ""),
                "requires": [text for text in one.get("requires_dist", []) if "extra ==" not in text],
            }
    pins = {name: one["version"] for name, one in found.items()} | BUILT_FROM_SOURCE
    lines = (f"{name}=={version}\n" for name, version in sorted(pins.items(), key=lambda pin: pin[0].lower()))
    (ROOT / "requirements" / "gpu.txt").write_text(HEAD + "".join(lines))
    (ROOT / "tests" / "data" / "gpu_stack.json").write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    main()
