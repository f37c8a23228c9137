from dppo_megatron import metric_names
from dppo_megatron.config.schema import LossConfig
from dppo_megatron.rl.loss import PolicyLoss


def test_every_metric_of_the_loss_has_a_logged_name() -> None:
    assert set(PolicyLoss(LossConfig()).metric_names) == set(metric_names.LOSS_METRICS)


def test_no_two_metrics_share_a_name() -> None:
    names = [value for key, value in vars(metric_names).items() if key.isupper() and isinstance(value, str)]
    names += metric_names.STAGE_SECONDS
    assert len(names) > 20
    assert len(set(names)) == len(names)
