"""The audit's projection and its running means."""

import numpy as np
import pytest
import torch

from dppo_megatron.rl.audit import SKETCH_SIZE, Audit, sketch


def gradient(seed: int) -> list[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [("a", torch.randn(300, 40, generator=draw)), ("b", torch.randn(5000, generator=draw))]


def test_the_projection_is_the_same_linear_map_at_every_call() -> None:
    one, other = gradient(0), gradient(1)
    mixed = [(name, 2 * x - y) for (name, x), (_, y) in zip(one, other, strict=True)]
    expected = 2 * sketch(one, seed=3) - sketch(other, seed=3)
    np.testing.assert_allclose(sketch(mixed, seed=3), expected, atol=1e-4)
    assert not np.allclose(sketch(one, seed=3), sketch(one, seed=4))


def test_the_projection_keeps_norms_and_inner_products() -> None:
    one, other = gradient(0), gradient(1)
    other = [(name, x + y) for (name, x), (_, y) in zip(one, other, strict=True)]
    flat, flat_other = (torch.cat([x.flatten() for _, x in g]).double().numpy() for g in (one, other))
    ours, theirs = sketch(one, seed=3), sketch(other, seed=3)
    tolerance = 4 / SKETCH_SIZE**0.5
    assert np.linalg.norm(ours) == pytest.approx(np.linalg.norm(flat), rel=tolerance)
    norms = np.linalg.norm(flat) * np.linalg.norm(flat_other)
    assert ours @ theirs == pytest.approx(flat @ flat_other, abs=tolerance * norms)


def test_restored_means_go_on_bit_for_bit_and_leave_the_state_as_it_was() -> None:
    rng, audit = np.random.default_rng(0), Audit()
    assert audit.state() == {}
    steps = rng.standard_normal((4, 2, SKETCH_SIZE))
    for estimate, full in steps[:2]:
        audit.add(estimate, full=full)
    state = {name: value.copy() for name, value in audit.state().items()}
    restored = Audit.from_state(state)
    for estimate, full in steps[2:]:
        assert restored.add(estimate, full=full) == audit.add(estimate, full=full)
    # What was restored is a copy: the same state can be restored again.
    assert (Audit.from_state(state).state()["full"] == steps[:2, 1].sum(0)).all()


def test_running_means_and_their_standard_error_are_those_of_all_audited_steps() -> None:
    rng, audit = np.random.default_rng(0), Audit()
    full = rng.standard_normal((6, SKETCH_SIZE)) + 1
    estimates = full + rng.standard_normal((6, SKETCH_SIZE)) * 0.5
    assert audit.add(estimates[0], full=full[0]).standard_error is None
    report = [audit.add(estimates[k], full=full[k]) for k in range(1, 6)][-1]
    errors = estimates - full
    norm = np.linalg.norm(full.mean(0))
    assert report.num_steps == 6
    assert report.relative_error == pytest.approx(np.linalg.norm(errors[5]) / np.linalg.norm(full[5]))
    cosine = estimates[5] @ full[5] / np.linalg.norm(estimates[5]) / np.linalg.norm(full[5])
    assert report.cosine == pytest.approx(cosine)
    assert report.mean_relative_error == pytest.approx(np.linalg.norm(errors.mean(0)) / norm)
    scatter = ((errors - errors.mean(0)) ** 2).sum() / 5 / 6
    assert report.standard_error == pytest.approx(scatter**0.5 / norm)
    # Errors of mean zero: the mean error is about its standard error.
    assert report.mean_relative_error == pytest.approx(report.standard_error, rel=0.2)
