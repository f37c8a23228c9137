"""The section ``logger`` of the configuration: the run's directory and its sinks."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class WandbConfig:
    """``logger.wandb``: where the run shows at Weights & Biases; without a name it has its directory's."""

    project: str = "dppo_megatron"
    name: str | None = None


@dataclass(frozen=True)
class LoggerConfig:
    """``logger``: the run's directory and its sinks."""

    log_dir: str = "logs"
    tensorboard_enabled: bool = False
    wandb_enabled: bool = False
    wandb: WandbConfig = field(default_factory=WandbConfig)
