"""What vLLM holds of a GPU and when, against a stand-in of its engine."""

import importlib.util
from contextlib import nullcontext
from pathlib import Path

import pytest

from dppo_megatron import device
from dppo_megatron.architecture import Architecture
from dppo_megatron.config.generation_schema import GenerationConfig, VllmConfig
from dppo_megatron.rl import vllm_engine
from dppo_megatron.rl.vllm_engine import VllmEngine

WEIGHTS, CACHE = "weights", "kv_cache"


class SleepingEngine:
    """Which of its memory is there, by vLLM's tags, and what was done."""

    def __init__(self) -> None:
        self.there = {WEIGHTS, CACHE}

    def sleep(self, *, level: int) -> None:
        assert level == 1  # the weights are kept on the host
        self.there = set()

    def wake_up(self, tags: list[str]) -> None:
        assert tags
        assert not self.there & set(tags), "vLLM maps memory once"
        self.there |= set(tags)

    def collective_rpc(self, name: str, *, kwargs: dict[str, object]) -> None:
        assert name == "reload_weights"
        assert self.there == {WEIGHTS}, "the trainer has not made way for the cache yet"


def start(monkeypatch: pytest.MonkeyPatch, *, gpu: bool) -> tuple[VllmEngine, SleepingEngine]:
    """An engine of ours on the stand-in."""
    inner = SleepingEngine()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(device, "has_gpu", lambda: gpu)
    monkeypatch.setattr(device, "release_cached_memory", lambda: None)
    monkeypatch.setattr(vllm_engine, "_start", lambda options: inner)
    monkeypatch.setattr(vllm_engine, "contained", nullcontext)
    monkeypatch.setattr(vllm_engine, "_options", lambda *_, **__: {})
    architecture = Architecture.__new__(Architecture)
    generation = GenerationConfig(max_new_tokens=8, vllm_cfg=VllmConfig(precision="bfloat16", max_model_len=16))
    return VllmEngine(Path("m"), architecture=architecture, generation=generation, max_cache_tokens=64), inner


def test_it_sleeps_until_the_weights_come_and_takes_its_cache_for_rollouts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, inner = start(monkeypatch, gpu=True)
    assert not inner.there, "the policy is built after it"
    for _ in range(2):
        engine.reload([])
        for _ in ("rollouts", "validation"):
            engine.wake()
            assert inner.there == {WEIGHTS, CACHE}
            engine.sleep()
            assert not inner.there


def test_off_the_gpu_it_holds_all_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, inner = start(monkeypatch, gpu=False)
    engine.sleep()
    engine.wake()
    assert inner.there == {WEIGHTS, CACHE}
