"""Rewards of test runs. ``score`` is one that even a model of a few warm-up steps earns: right digits by place."""


def score(prompt: str, completion: str, answer: str) -> float:
    """Digits in their right places over the longer length."""
    right = sum(mine == theirs for mine, theirs in zip(completion, answer, strict=False))
    return right / max(len(completion), len(answer))


def same(prompt: str, completion: str, answer: str) -> float:
    """The same for every completion: no group has an advantage."""
    return 0.5


def nothing(prompt: str, completion: str, answer: str) -> float:
    """No completion is worth anything: no group has an advantage."""
    return 0.0


def seldom(prompt: str, completion: str, answer: str) -> float:
    """``score`` where the prompt begins with an even digit, else nothing: half of the groups have no advantage."""
    return score(prompt, completion, answer) if int(prompt[0]) % 2 == 0 else 0.0
