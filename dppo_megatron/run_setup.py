"""From a configuration to the objects that a run's steps work with."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoConfig, AutoTokenizer

from dppo_megatron import device
from dppo_megatron.architecture import Architecture, read_architecture
from dppo_megatron.batches import FloatArray, PromptBatch, Purpose, RolloutBatch, Sampling
from dppo_megatron.config.loader import LoadedConfig
from dppo_megatron.config.schema import Config, GrpoConfig
from dppo_megatron.model_source import find_model, read_model_config
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.hf_names import streamed_names
from dppo_megatron.parallel.mesh import Mesh, split_axis
from dppo_megatron.parallel.model import DTYPES
from dppo_megatron.parallel.policy import Policy, Reference
from dppo_megatron.parallel.sequence_sums import SequenceSums
from dppo_megatron.parallel.set_aside import training_state_set_aside
from dppo_megatron.plan import batch_arithmetic, samples_with_vllm, sets_training_aside
from dppo_megatron.rl.audit import Audit
from dppo_megatron.rl.candidates import CandidateSource, FixedNumber, Refill
from dppo_megatron.rl.dynamic_sampling import FirstBatch, Resampling, WholeGroups
from dppo_megatron.rl.generator import EmbeddedGenerator, Generator
from dppo_megatron.rl.loss import PolicyLoss
from dppo_megatron.rl.prompt_history import PromptHistory
from dppo_megatron.rl.prompts import PromptDataset, Prompts, load_prompts, validation_batch
from dppo_megatron.rl.pruning import Pruning
from dppo_megatron.rl.replay import ReplayGenerator
from dppo_megatron.rl.rewards import Reward, make_reward, score_rollouts
from dppo_megatron.rl.vllm_engine import VllmEngine
from dppo_megatron.rl.vllm_generator import VllmGenerator
from dppo_megatron.run_state import Resumed, RunState, fingerprint
from dppo_megatron.skipped_updates import SkippedUpdates
from dppo_megatron.stop_request import StopRequest
from dppo_megatron.wandb_sink import keep_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run reads before any process group exists: model directory, tokenizer, prompts.

    validation: None where there is no validation set, or no engine to sample for it (replay).
    """

    source: Path
    architecture: Architecture
    tokenizer: "PreTrainedTokenizerBase"
    train: PromptDataset
    validation: PromptBatch | None
    stop_token_ids: tuple[int, ...]


def read_inputs(config: Config) -> Inputs:
    """Find the model, read the data. Raises ValueError for what the user has to mend."""
    source = find_model(config.policy.model_name)
    name = config.policy.tokenizer.name
    directory = source if name == config.policy.model_name else find_model(name)
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    # A completion may be as long as its prompt leaves room for, but not empty.
    max_prompt_tokens = config.policy.max_total_sequence_length - 1
    if config.data.max_input_seq_length is not None:
        max_prompt_tokens = min(max_prompt_tokens, config.data.max_input_seq_length)
    load = partial(
        load_prompts,
        tokenizer=tokenizer,
        tokenizer_config=config.policy.tokenizer,
        max_prompt_tokens=max_prompt_tokens,
    )
    train, held_out, validation = load(config.data.train), None, None
    if config.data.train.split_validation_size:
        train, held_out = train.split(config.data.train.split_validation_size, seed=config.data.train.seed)
    if config.dppo.rollout.replay_dir is None:
        held_out = held_out if config.data.validation is None else load(config.data.validation)
        if held_out is not None:
            validation = validation_batch(held_out, max_samples=config.grpo.max_val_samples)
    return Inputs(
        source=source,
        architecture=read_architecture(read_model_config(source)),
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        stop_token_ids=find_stop_token_ids(config, tokenizer, source),
    )


def find_stop_token_ids(config: Config, tokenizer: "PreTrainedTokenizerBase", source: Path) -> tuple[int, ...]:
    """The configured ones, those of the model's generation config, and the tokenizer's end of sequence."""
    from transformers import GenerationConfig

    ids = set(config.policy.generation.stop_token_ids or ())
    if (source / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(source).eos_token_id
        ids |= {eos} if isinstance(eos, int) else set(eos or ())
    if isinstance(tokenizer.eos_token_id, int):
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise ValueError(
            "policy.generation.stop_token_ids: the tokenizer and the model's generation config name no end of "
            "sequence, so no completion would ever stop; give the ids"
        )
    return tuple(sorted(ids))


@dataclass(frozen=True, slots=True)
class Run:
    """A run, ready for its next step. ``first_step``: 0, or where the newest checkpoint stands.

    wandb_id: of the run at Weights & Biases, on the first rank; None where nothing was ever sent there.
    """

    config: Config
    mesh: Mesh
    inputs: Inputs
    policy: Policy
    reference: Reference | None
    generator: Generator
    prompts: Prompts
    candidates: CandidateSource
    resampling: Resampling
    history: PromptHistory
    pruning: Pruning
    loss: PolicyLoss
    audit: Audit
    reward: Reward
    sampling: Sampling
    validation_sampling: Sampling
    num_minibatches: int
    state: RunState | None
    skipped: SkippedUpdates
    stop: StopRequest
    first_step: int
    num_steps: int
    wandb_id: str | None

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.reward.close()
        self.generator.close()

    def notes(self) -> list[str]:
        """What a person should know before the first step."""
        layout, grpo = self.mesh.layout, self.config.grpo
        start = f"continues after step {self.first_step}" if self.first_step else "starts"
        if self.first_step >= self.num_steps:
            start = f"is complete: all {self.num_steps} steps are done"
        chunks = f" of {layout.virtual_pp} chunks" if layout.virtual_pp > 1 else ""
        processes = f"{layout.world_size} process" + ("es" if layout.world_size > 1 else "")
        return [
            f"{self.config.policy.model_name} {start}: {self.num_steps} steps of {grpo.num_prompts_per_step} prompts "
            f"x {grpo.num_generations_per_prompt} completions on {processes} "
            f"(tp {layout.tp}, pp {layout.pp}{chunks}, cp {layout.cp}, dp {layout.dp}), "
            f"device {device.current().type}",
            *self.pruning.notes,
        ]

    @property
    def has_vllm(self) -> bool:
        """Whether vLLM samples, whose ranks communicate meanwhile."""
        return samples_with_vllm(self.config, on_gpu=device.has_gpu())

    def room_for_rollouts(self) -> AbstractContextManager[None]:
        """On a GPU that vLLM shares: what only training needs makes way meanwhile."""
        if not (device.has_gpu() and sets_training_aside(self.config)):
            return nullcontext()
        return training_state_set_aside(self.policy.chunks, self.policy.optimizer)

    def score(self, rollouts: RolloutBatch) -> FloatArray:
        """Rewards of this rank's completions, float64 [n]."""
        return score_rollouts(rollouts, reward=self.reward, tokenizer=self.inputs.tokenizer)

    def decode(self, rollouts: RolloutBatch) -> list[str]:
        """Texts of this rank's completions, for people."""
        rows = [rollouts.completions[row].tolist() for row in range(len(rollouts.completions))]
        return self.inputs.tokenizer.batch_decode(rows, skip_special_tokens=False)

    def validates_before(self, step: int) -> bool:
        """Whether the run validates before its first step; a resumed one has done so."""
        return step == 0 and self.config.grpo.val_at_start and self.inputs.validation is not None

    def validates_after(self, step: int) -> bool:
        """Whether the run validates after step ``step``."""
        grpo, last = self.config.grpo, step + 1 == self.num_steps
        periodic = grpo.val_period > 0 and (step + 1) % grpo.val_period == 0  # 0 and -1 are never
        due = periodic or (last and grpo.val_at_end)
        return due and self.inputs.validation is not None

    def saves_after(self, step: int) -> bool:
        """Whether the run leaves a checkpoint after step ``step``: every ``save_period`` steps, and at the end."""
        due = (step + 1) % self.config.checkpointing.save_period == 0 or step + 1 == self.num_steps
        return due and self.state is not None


def set_up(loaded: LoadedConfig, inputs: Inputs, mesh: Mesh, *, stop: StopRequest) -> Run:
    """Build every part of a run and continue from its newest checkpoint; called by every rank."""
    config = loaded.config
    grpo, policy_config = config.grpo, config.policy
    max_new_tokens = policy_config.generation.max_new_tokens
    pruning = Pruning.from_config(config.dppo, loss_fn=config.loss_fn, grpo=grpo, max_new_tokens=max_new_tokens)
    arithmetic = batch_arithmetic(grpo, train_global_batch_size=policy_config.train_global_batch_size)
    prompts = Prompts(
        inputs.train,
        num_prompts_per_step=grpo.num_prompts_per_step * grpo.batch_multiplier,
        num_minibatches=arithmetic.num_minibatches,
        shuffle=config.data.shuffle,
        seed=grpo.seed,
    )
    sampling = _sampling(config, inputs)
    reward = make_reward(config.data.train.env_name, reward=config.dppo.reward, env=config.env)
    generator = make_generator(config, inputs, mesh=mesh)
    rehearse = config.dppo.fp8_emulate
    policy = Policy(policy_config, inputs.architecture, source=inputs.source, mesh=mesh, rehearse_fp8=rehearse)
    # The reference is the policy before any step: taken before a checkpoint is restored.
    reference = policy.reference() if config.loss_fn.reference_policy_kl_penalty else None
    state = _run_state(loaded, inputs)
    section = config.dppo.prompt_pruning
    ema_decay, greso = section.ema_decay, section.greso if section.policy == "greso" else None
    resumed = state.restore(policy, prompts=prompts, ema_decay=ema_decay, greso=greso) if state else None
    history = resumed.history if resumed else PromptHistory(ema_decay=ema_decay, greso=greso)
    return Run(
        config=config,
        mesh=mesh,
        inputs=inputs,
        policy=policy,
        reference=reference,
        generator=generator,
        prompts=prompts,
        candidates=Refill(prompts, history, pruning) if section.refill else FixedNumber(prompts),
        resampling=_resampling(grpo, num_minibatches=arithmetic.num_minibatches),
        history=history,
        pruning=pruning,
        audit=resumed.audit if resumed else Audit(),
        loss=PolicyLoss(config.loss_fn, sequence_sums=SequenceSums(mesh.cp)),
        reward=reward,
        sampling=sampling,
        validation_sampling=_validation_sampling(sampling, config),
        num_minibatches=arithmetic.num_minibatches,
        state=state,
        skipped=SkippedUpdates(
            limit=config.dppo.max_skipped_updates, directory=Path(config.logger.log_dir), world=mesh.world
        ),
        stop=stop,
        first_step=resumed.num_steps_done if resumed else 0,
        num_steps=min(grpo.max_num_steps, grpo.max_num_epochs * prompts.steps_per_epoch),
        wandb_id=_wandb_id(config, resumed, mesh=mesh),
    )


def _sampling(config: Config, inputs: Inputs) -> Sampling:
    return Sampling(
        num_generations=config.grpo.num_generations_per_prompt,
        temperature=config.policy.generation.temperature,
        max_new_tokens=config.policy.generation.max_new_tokens,
        stop_token_ids=inputs.stop_token_ids,
        purpose=Purpose.GENERATION,
        max_total_tokens=config.policy.max_total_sequence_length,
    )


def _validation_sampling(sampling: Sampling, config: Config) -> Sampling:
    return replace(
        sampling,
        num_generations=config.grpo.val_num_generations_per_prompt,
        temperature=config.policy.generation.val_temperature,
        purpose=Purpose.VALIDATION,
    )


def _wandb_id(config: Config, resumed: Resumed | None, *, mesh: Mesh) -> str | None:
    known = resumed.wandb_id if resumed else None
    if not (config.logger.wandb_enabled and mesh.world.is_first):
        return known
    return keep_id(Path(config.logger.log_dir), resumed=known)


def _resampling(grpo: GrpoConfig, *, num_minibatches: int) -> Resampling:
    if not grpo.use_dynamic_sampling:
        return FirstBatch()
    return WholeGroups(
        num_prompts=grpo.num_prompts_per_step,
        num_minibatches=num_minibatches,
        max_batches=grpo.dynamic_sampling_max_gen_batches,
    )


def _run_state(loaded: LoadedConfig, inputs: Inputs) -> RunState | None:
    if not loaded.config.checkpointing.enabled:
        return None
    digest = blake2b(inputs.train.prompt_ids.tobytes(), digest_size=8)
    digest.update("\0".join(inputs.train.answers).encode())
    return RunState(
        loaded.config.checkpointing,
        loaded.config.dppo.checkpoint,
        fingerprint(
            loaded.effective,
            architecture=inputs.architecture,
            data_digest=int.from_bytes(digest.digest(), "little"),
        ),
    )


def make_generator(config: Config, inputs: Inputs, *, mesh: Mesh) -> Generator:
    """The engine that the configuration names, without weights yet; called by every rank.

    Before the policy takes memory: vLLM measures what a GPU has free, and sleeps until the weights come.
    """
    rollout = config.dppo.rollout
    if rollout.replay_dir is not None:
        return ReplayGenerator(Path(rollout.replay_dir))
    if samples_with_vllm(config, on_gpu=device.has_gpu()):
        return _make_vllm_generator(config, inputs, mesh=mesh)
    return EmbeddedGenerator(
        AutoConfig.from_pretrained(inputs.source),
        dtype=DTYPES[config.policy.precision],
        device=device.current(),
        max_cache_tokens=rollout.max_cache_tokens,
    )


def _make_vllm_generator(config: Config, inputs: Inputs, *, mesh: Mesh) -> VllmGenerator:
    rollout, generation = config.dppo.rollout, config.policy.generation
    ranks = split_axis(mesh.world, generation.vllm_cfg.tensor_parallel_size, name="engine")
    engine = VllmEngine(
        inputs.source,
        architecture=inputs.architecture,
        generation=generation,
        max_cache_tokens=rollout.max_cache_tokens,
    )
    return VllmGenerator(
        engine,
        weight_names=streamed_names(inputs.architecture),
        max_model_len=generation.vllm_cfg.max_model_len,
        time_limit_seconds=rollout.time_limit_seconds,
        pool=partial(collectives.gather_objects, axis=ranks),
        engine_rank=ranks.rank,
        tensor_parallel_size=ranks.size,
    )
