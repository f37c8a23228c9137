"""One rank of a run whose engine fails on the second rank in its fourth step, and of its restart.

argv: which rollouts of the step fail (1 for the first), configuration file, overrides. Exits with an error where a
rank does not learn of it, or the restart differs.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from dppo_megatron import device
from dppo_megatron.batches import PromptBatch, Purpose, RolloutBatch, Sampling
from dppo_megatron.config.loader import load_config
from dppo_megatron.parallel.mesh import open_mesh
from dppo_megatron.plan import resolve_layout
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.generator import Generator
from dppo_megatron.run_log import SilentLog
from dppo_megatron.run_setup import read_inputs, set_up
from dppo_megatron.stages import EngineError
from dppo_megatron.stop_request import StopRequest
from dppo_megatron.train import train
from dppo_megatron.watchdog import Watchdog

FATAL_STEP, FATAL_VALIDATION = 3, 4
STARTS = ((0, Purpose.GENERATION), (FATAL_STEP, Purpose.VALIDATION), (FATAL_VALIDATION, None))
"""The first step of each start, and what its engine fails in on one rank."""


@dataclass
class FailingGenerator:
    """Another generator, until it fails; remembers the prompts that it was asked for, first in each step."""

    inner: Generator
    fails_in: Purpose | None
    fatal_call: int
    asked: dict[int, list[int]] = field(default_factory=dict)
    calls: int = 0
    tensor_parallel_size: int = 1

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        self.inner.load_weights(weights, version=version)

    def generate(self, prompts: PromptBatch, draws: Draws, sampling: Sampling) -> RolloutBatch:
        if sampling.purpose is Purpose.GENERATION:
            self.calls = self.calls + 1 if draws.step in self.asked else 1
            self.asked.setdefault(draws.step, prompts.prompt_ids.tolist())
        fatal = FATAL_VALIDATION if sampling.purpose is Purpose.VALIDATION else FATAL_STEP
        due = sampling.purpose is Purpose.VALIDATION or self.calls == self.fatal_call
        if self.fails_in is sampling.purpose and draws.step == fatal and due:
            raise RuntimeError("vLLM failed; unfinished requests: 7.0.1")
        return self.inner.generate(prompts, draws, sampling)

    def close(self) -> None:
        self.inner.close()


def main() -> None:
    """Fail, then go on from the checkpoint that the failure left."""
    device.set_num_threads()
    device.start_process_group()
    rank = torch.distributed.get_rank()
    loaded = load_config(sys.argv[2], sys.argv[3:])
    layout = resolve_layout(loaded.config.cluster, megatron=loaded.config.policy.megatron_cfg, virtual_pp=1)
    asked: list[dict[int, list[int]]] = []
    stop = StopRequest(must_save_by_seconds=None)
    watchdog = Watchdog(loaded.config.dppo.watchdog, directory=Path(loaded.config.logger.log_dir), rank=rank)
    for first_step, fails_in in STARTS:
        with open_mesh(layout, seed=0) as mesh, set_up(loaded, read_inputs(loaded.config), mesh, stop=stop) as run:
            assert run.first_step == first_step, run.first_step
            generator = FailingGenerator(
                run.generator, fails_in=fails_in if rank == 1 else None, fatal_call=int(sys.argv[1])
            )
            message = ""
            try:
                train(replace(run, generator=generator), SilentLog(), watchdog)
            except EngineError as error:
                message = str(error)
            assert message == ("rank 1: vLLM failed; unfinished requests: 7.0.1" if fails_in else ""), message
            asked.append(generator.asked)
    assert asked[0][FATAL_STEP] == asked[1][FATAL_STEP], "the step is taken again with the same prompts"
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
