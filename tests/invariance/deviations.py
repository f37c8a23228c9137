"""How far a configuration's outcome is from plain torch's in float64, or from one process's."""

from dataclasses import dataclass

import torch
from torch import Tensor
from toy_step import ReferenceUpdate

QUANTITIES = ("logprobs", "loss", "grad_norm", "gradients", "first", "second", "weights")
TENSORS = QUANTITIES[3:]

Outcome = dict[str, Tensor]


@dataclass(frozen=True)
class Deviations:
    """The largest deviation of each quantity, in the order of QUANTITIES.

    Log-probs: absolute, of any token before either step. Loss and gradient norm: relative, of either step. The
    others: over a tensor's largest absolute value, of the worst tensor, after both steps.
    """

    values: tuple[float, ...]

    def __getitem__(self, quantity: str) -> float:
        return self.values[QUANTITIES.index(quantity)]

    @property
    def largest(self) -> float:
        """Of all quantities; infinite where one is not finite."""
        return max(value if value == value else float("inf") for value in self.values)


def as_outcome(reference: ReferenceUpdate, second: ReferenceUpdate) -> Outcome:
    """The plain update under the worker's names. reference: after one step; second: after two."""
    longest = max(len(values) for values in reference.logprobs)
    outcome: Outcome = {}
    for number, update in enumerate((reference, second)):
        rows = [torch.nn.functional.pad(values, (0, longest - len(values))) for values in update.logprobs]
        outcome[f"logprobs.{number}"] = torch.stack(rows)
        outcome[f"loss.{number}"] = torch.tensor(second.losses[number], dtype=torch.float64)
        outcome[f"grad_norm.{number}"] = torch.tensor(second.grad_norms[number], dtype=torch.float64)
    for kind in TENSORS:
        outcome |= {f"{kind}.{name}": tensor for name, tensor in getattr(second, kind).items()}
    return outcome


def compare(outcome: Outcome, other: Outcome) -> Deviations:
    """Deviations of ``outcome`` from ``other``, whose tensors it must all hold."""
    return Deviations(
        (
            max(_absolute(outcome, other, f"logprobs.{number}") for number in range(2)),
            max(_relative(outcome, other, f"loss.{number}") for number in range(2)),
            max(_relative(outcome, other, f"grad_norm.{number}") for number in range(2)),
            *(
                max(_relative(outcome, other, name) for name in other if name.startswith(f"{kind}."))
                for kind in TENSORS
            ),
        )
    )


def _absolute(outcome: Outcome, other: Outcome, name: str) -> float:
    return float((outcome[name].double() - other[name].double()).abs().max())


def _relative(outcome: Outcome, other: Outcome, name: str) -> float:
    return _absolute(outcome, other, name) / float(other[name].double().abs().max())
