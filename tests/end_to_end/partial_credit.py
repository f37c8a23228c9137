"""A reward that even a model of a few warm-up steps earns: the share of places with the right digit."""


def score(prompt: str, completion: str, answer: str) -> float:
    """Digits in their right places over the longer length."""
    right = sum(mine == theirs for mine, theirs in zip(completion, answer, strict=False))
    return right / max(len(completion), len(answer))
