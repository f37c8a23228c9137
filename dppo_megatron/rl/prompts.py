"""Prompts: reading a data set, and the stream of candidates that training takes from it."""

import json
import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dppo_megatron.batches import IntArray, PromptBatch, Purpose, Ragged
from dppo_megatron.config.named_sets import what_is_missing
from dppo_megatron.config.schema import DatasetConfig, TokenizerConfig
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.prompt_tokens import TokenizerError, encode_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_MAX_SHOWN = 5
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class PromptDataset:
    """The prompts of one file, in its order, tokenised.

    prompt_ids: int64 [rows], blake2b hash (8 bytes) of the token ids. tokens: int32 rows.
    texts: [rows], the file's own text, before any template. answers: [rows].
    """

    prompt_ids: IntArray
    tokens: Ragged
    texts: tuple[str, ...]
    answers: tuple[str, ...]

    def __post_init__(self) -> None:
        assert len(self.prompt_ids) == len(self.tokens) == len(self.texts) == len(self.answers) > 0

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def split(self, fraction: float, *, seed: int) -> tuple["PromptDataset", "PromptDataset"]:
        """Set a fraction of the rows aside, drawn by the seed: those that stay and those set aside, in file order.

        Raises ValueError where either part would be empty.
        """
        count = round(fraction * len(self))
        if not 0 < count < len(self):
            raise ValueError(
                f"data.train.split_validation_size is {fraction}, which sets {count} of {len(self)} prompts aside; "
                "both parts need one at least"
            )
        order = np.argsort(Draws(seed=seed, step=0).words(Purpose.SPLIT, np.arange(len(self))), kind="stable")
        return self._take(np.sort(order[count:])), self._take(np.sort(order[:count]))

    def _take(self, rows: IntArray) -> "PromptDataset":
        return PromptDataset(
            prompt_ids=self.prompt_ids[rows],
            tokens=self.tokens.take(rows),
            texts=tuple(self.texts[row] for row in rows),
            answers=tuple(self.answers[row] for row in rows),
        )


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    text: str
    answer: str


def load_prompts(
    config: DatasetConfig,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    tokenizer_config: TokenizerConfig,
    max_prompt_tokens: int,
) -> PromptDataset:
    """Read a JSONL file of prompts and answers and tokenise it.

    Blank lines are skipped. Prompts of more than ``max_prompt_tokens`` tokens are dropped, and repeated
    prompts kept; both are counted in the log.

    Raises ValueError on a missing or empty file, on bad rows (file and line of the first five), on one prompt
    with different answers, on a template that cannot be used, where the tokenizer fails (file and line), and where
    every prompt is too long.
    """
    rows = _read_rows(Path(config.data_path), config=config)
    try:
        token_rows = encode_prompts(
            [row.text for row in rows], config=config, tokenizer=tokenizer, tokenizer_config=tokenizer_config
        )
    except TokenizerError as error:
        problem = f"{rows[error.index].line}: the tokenizer of {tokenizer_config.name} fails on this prompt: {error}"
        raise ValueError(f"{config.data_path}:{problem}") from error
    _raise_bad_rows(
        config.data_path,
        (f"{row.line}: the prompt has no tokens" for row, ids in zip(rows, token_rows, strict=True) if not ids),
    )
    fits = [0 < len(ids) <= max_prompt_tokens for ids in token_rows]
    if not any(fits):
        raise ValueError(
            f"{config.data_path}: all {len(rows)} prompts are longer than {max_prompt_tokens} tokens (the "
            f"shortest has {min(map(len, token_rows))}); raise data.max_input_seq_length and what bounds it"
        )
    if not all(fits):
        text = "%s: dropped %d of %d prompts, longer than %d tokens"
        logger.warning(text, config.data_path, fits.count(False), len(rows), max_prompt_tokens)
    rows = [row for row, fit in zip(rows, fits, strict=True) if fit]
    tokens = Ragged.from_rows(ids for ids, fit in zip(token_rows, fits, strict=True) if fit)
    prompt_ids = np.array([_hash_tokens(tokens[row]) for row in range(len(tokens))], np.int64)
    _check_repeats(rows, prompt_ids=prompt_ids, path=config.data_path)
    return PromptDataset(
        prompt_ids=prompt_ids,
        tokens=tokens,
        texts=tuple(row.text for row in rows),
        answers=tuple(row.answer for row in rows),
    )


def _read_rows(path: Path, *, config: DatasetConfig) -> list[_Row]:
    if not path.is_file():
        raise ValueError(what_is_missing(config.data_path, name=config.dataset_name, split=config.split))
    rows: list[_Row] = []
    problems: list[str] = []
    # Split as bytes: str.splitlines would also split inside JSON strings that hold U+2028.
    for line, content in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not content.strip():
            continue
        row = _parse_row(content, line=line, config=config)
        if isinstance(row, _Row):
            rows.append(row)
        else:
            problems.append(f"{line}: {row}")
    _raise_bad_rows(config.data_path, problems)
    if not rows:
        raise ValueError(f"{config.data_path}: the file has no rows; it needs one JSON object a line")
    return rows


def _parse_row(content: bytes, *, line: int, config: DatasetConfig) -> "_Row | str":
    """One row, or what is wrong with it and what to do."""
    try:
        row = json.loads(content)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error}); each line must be one JSON object"
    if not isinstance(row, dict):
        return f"a {type(row).__name__}; each line must be one JSON object"
    for field, key in (("input_key", config.input_key), ("output_key", config.output_key)):
        if key not in row:
            return f"no key {key!r}, only {', '.join(map(repr, row)) or 'none'}; set {field}"
    text, answer = row[config.input_key], row[config.output_key]
    if not isinstance(text, str):
        return f"{config.input_key!r} is a {type(text).__name__}; it must be a string"
    if not text.strip():
        return f"{config.input_key!r} is empty; remove the row"
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
    if not (isinstance(answer, str) or is_number):
        return f"{config.output_key!r} is {answer!r:.40}; it must be a string or a finite number"
    if _HALF_CHARACTER.search(f"{text}{answer}"):
        return "a text holds half of a surrogate pair, which no file can hold; remove it"
    return _Row(line=line, text=text, answer=str(answer))


def _raise_bad_rows(path: str, problems: Iterable[str]) -> None:
    problems = list(problems)
    if problems:
        shown = "".join(f"\n  {path}:{problem}" for problem in problems[:_MAX_SHOWN])
        more = f"\n  and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        raise ValueError(f"{path}: {len(problems)} bad rows{shown}{more}")


def _check_repeats(rows: Sequence[_Row], *, prompt_ids: IntArray, path: str) -> None:
    _, first_rows, groups = np.unique(prompt_ids, return_index=True, return_inverse=True)
    firsts = (rows[first] for first in first_rows[groups])
    _raise_bad_rows(
        path,
        (
            f"{row.line}: the prompt of line {first.line} with another answer "
            f"({row.answer!r:.40}, there {first.answer!r:.40}); keep one"
            for row, first in zip(rows, firsts, strict=True)
            if row.answer != first.answer
        ),
    )
    if num_repeats := len(rows) - len(first_rows):
        logger.warning(
            "%s: %d of %d prompts repeat an earlier one; they share its history", path, num_repeats, len(rows)
        )


def _hash_tokens(tokens: np.ndarray) -> int:
    digest = blake2b(tokens.astype("<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class Prompts:
    """The endless stream of training candidates: one permutation of the data set after another.

    Each epoch visits every row once; its order is a function of the seed and the epoch alone. A step may span
    epochs, so ``steps_per_epoch`` (rounded up) is where the first epoch ends.

    Raises ValueError on fewer prompts a step than mini-batches.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        *,
        num_prompts_per_step: int,
        num_minibatches: int,
        shuffle: bool,
        seed: int,
    ) -> None:
        if not 1 <= num_minibatches <= num_prompts_per_step:
            raise ValueError(
                f"grpo.num_prompts_per_step is {num_prompts_per_step} for {num_minibatches} optimizer steps a "
                "rollout batch; each needs at least one prompt"
            )
        self._dataset = dataset
        self.num_prompts_per_step = num_prompts_per_step
        self._num_minibatches = num_minibatches
        self._shuffle = shuffle
        self._seed = seed
        self._cursor = 0
        self._order = (-1, np.zeros(0, np.int64))

    @property
    def steps_per_epoch(self) -> int:
        """Steps that it takes to see every prompt once."""
        return -(-len(self._dataset) // self.num_prompts_per_step)

    def next_batch(self, num_prompts: int | None = None) -> PromptBatch:
        """The next candidates, ``num_prompts_per_step`` or the given number, as ``peek`` shows them."""
        count = num_prompts or self.num_prompts_per_step
        batch = self.peek(count)
        self._cursor += count
        return batch

    def peek(self, num_prompts: int) -> PromptBatch:
        """The next candidates without taking them: in contiguous equal mini-batches, all weights 1."""
        places = np.arange(self._cursor, self._cursor + num_prompts)
        epochs, positions = np.divmod(places, len(self._dataset))
        rows = [self._epoch_order(int(epoch))[positions[epochs == epoch]] for epoch in np.unique(epochs)]
        minibatches = equal_chunks(num_prompts, num_chunks=self._num_minibatches)
        return _batch(self._dataset, rows=np.concatenate(rows), minibatches=minibatches)

    def state(self) -> dict[str, int]:
        """What a checkpoint needs: candidates taken so far, and the size of the data set."""
        return {"cursor": self._cursor, "num_rows": len(self._dataset)}

    def restore(self, state: dict[str, int]) -> None:
        """Go on where the saved stream stood.

        Raises ValueError where it was a stream over a data set of another size.
        """
        if state["num_rows"] != len(self._dataset):
            raise ValueError(
                f"the checkpoint's data set has {state['num_rows']} prompts, data.train.data_path gives "
                f"{len(self._dataset)}; resume with the same data"
            )
        self._cursor = state["cursor"]

    def _epoch_order(self, epoch: int) -> IntArray:
        if self._order[0] != epoch:
            order = np.arange(len(self._dataset))
            if self._shuffle:
                words = Draws(seed=self._seed, step=epoch).words(Purpose.SHUFFLE, order)
                order = np.argsort(words, kind="stable")
            self._order = (epoch, order)
        return self._order[1]


def validation_batch(dataset: PromptDataset, *, max_samples: int) -> PromptBatch:
    """The first ``max_samples`` prompts of a data set, in file order, as one mini-batch."""
    assert max_samples > 0
    rows = np.arange(min(max_samples, len(dataset)))
    return _batch(dataset, rows=rows, minibatches=np.zeros(len(rows), np.int64))


def equal_chunks(num_items: int, *, num_chunks: int) -> IntArray:
    """The chunk (0 .. num_chunks - 1) of each item: contiguous, as equal as they can be; int64 [num_items]."""
    return np.arange(num_items, dtype=np.int64) * num_chunks // num_items


def _batch(dataset: PromptDataset, *, rows: IntArray, minibatches: IntArray) -> PromptBatch:
    prompt_ids = dataset.prompt_ids[rows]
    return PromptBatch(
        prompt_ids=prompt_ids,
        occurrences=count_earlier(prompt_ids),
        minibatches=minibatches,
        tokens=dataset.tokens.take(rows),
        texts=tuple(dataset.texts[row] for row in rows),
        answers=tuple(dataset.answers[row] for row in rows),
        weights=np.ones(len(rows)),
        num_candidates=np.bincount(minibatches).astype(np.int64),
    )


def count_earlier(values: IntArray) -> IntArray:
    """How many times each value stands earlier, int64 [P]."""
    order = np.argsort(values, kind="stable")
    _, starts, sizes = np.unique(values[order], return_index=True, return_counts=True)
    counts = np.empty(len(values), np.int64)
    counts[order] = np.arange(len(values)) - np.repeat(starts, sizes)
    return counts
