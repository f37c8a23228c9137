"""Reading prompts, and the stream of training candidates."""

import json
import logging
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dppo_megatron.batches import Ragged
from dppo_megatron.config.schema import DatasetConfig, TokenizerConfig
from dppo_megatron.rl.prompts import PromptDataset, Prompts, load_prompts, validation_batch

WORDS = ["<pad>", "<eos>", "<bos>", "<unk>", *"0123456789+=<>{}[] :.abcdefghijklmnopqrstuvwxyz"]
EOS, BOS = 1, 2
TEMPLATE = "{% for m in messages %}[{{m['role']}}]{{m['content']}}{% endfor %}{% if think %}t{% endif %}"
GENERATION_PROMPT = "{% if add_generation_prompt %}[a]{% endif %}"


def make_tokenizer(*, template: str = "") -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: row for row, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    if template == "":
        words.post_processor = processors.TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", eos_token="<eos>")
    if template:
        tokenizer.chat_template = template
    return tokenizer


def ids(text: str) -> list[int]:
    return [WORDS.index(letter) for letter in text]


def write(folder: Path, *lines: object) -> str:
    path = folder / "data.jsonl"
    rows = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("\n".join(rows), encoding="utf-8")
    return str(path)


def row(text: object, answer: object) -> dict[str, object]:
    return {"input": text, "output": answer}


def load(
    config: DatasetConfig,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    chat: TokenizerConfig | None = None,
    max_prompt_tokens: int = 100,
) -> PromptDataset:
    return load_prompts(
        config,
        tokenizer=tokenizer or make_tokenizer(),
        tokenizer_config=chat or TokenizerConfig(name="tiny", chat_template=None),
        max_prompt_tokens=max_prompt_tokens,
    )


def make_dataset(num_rows: int, *, distinct: int | None = None) -> PromptDataset:
    contents = [value % (distinct or num_rows) for value in range(num_rows)]
    return PromptDataset(
        prompt_ids=np.array(contents, np.int64) * 7919,
        tokens=Ragged.from_rows([[value] * (value % 3 + 1) for value in contents]),
        texts=tuple(f"text {value}" for value in range(num_rows)),
        answers=tuple(f"answer {value}" for value in range(num_rows)),
    )


def make_stream(
    dataset: PromptDataset, *, prompts: int = 4, minibatches: int = 1, shuffle: bool = True, seed: int = 1
) -> Prompts:
    return Prompts(dataset, num_prompts_per_step=prompts, num_minibatches=minibatches, shuffle=shuffle, seed=seed)


def test_a_raw_prompt_gets_the_beginning_that_the_tokenizer_writes_but_not_its_end(tmp_path: Path) -> None:
    path = write(tmp_path, row("1+2=", "3"), "", "   ", row("a\u2028b", 4), row("b", 0.5))
    dataset = load(DatasetConfig(data_path=path))
    assert dataset.tokens[0].tolist() == [BOS, *ids("1+2=")]
    assert dataset.texts == ("1+2=", "a\u2028b", "b")
    assert dataset.answers == ("3", "4", "0.5")
    bare = load(DatasetConfig(data_path=path), tokenizer=make_tokenizer(template=TEMPLATE))
    assert bare.tokens[0].tolist() == ids("1+2=")


def test_prompt_ids_are_hashes_of_the_token_ids(tmp_path: Path) -> None:
    dataset = load(DatasetConfig(data_path=write(tmp_path, row("1", "a"), row("22", "b"))))
    expected = [
        int.from_bytes(blake2b(b"".join(t.to_bytes(4, "little") for t in tokens), digest_size=8).digest(), "little")
        for tokens in ([BOS, *ids("1")], [BOS, *ids("22")])
    ]
    assert dataset.prompt_ids.astype(np.uint64).tolist() == expected


@pytest.mark.parametrize("inline", [True, False])
def test_chat_templates_prompt_files_and_keys_make_the_prompt(tmp_path: Path, inline: bool) -> None:
    (tmp_path / "prompt.txt").write_text("solve {} in <{{}}>")
    (tmp_path / "system.txt").write_text("be brief")
    (tmp_path / "chat.jinja").write_text(TEMPLATE + GENERATION_PROMPT)
    config = DatasetConfig(
        data_path=write(tmp_path, {"question": "1+2", "answer": 3, "input": 0}),
        input_key="question",
        output_key="answer",
        prompt_file=str(tmp_path / "prompt.txt"),
        system_prompt_file=str(tmp_path / "system.txt"),
    )
    chat = TokenizerConfig(
        name="tiny",
        chat_template=TEMPLATE + GENERATION_PROMPT if inline else str(tmp_path / "chat.jinja"),
        chat_template_kwargs={"think": True},
    )
    dataset = load(config, chat=chat)
    assert dataset.tokens[0].tolist() == ids("[system]be brief[user]solve 1+2 in <{}>t[a]")
    assert (dataset.texts, dataset.answers) == (("1+2",), ("3",))


def test_default_is_the_tokenizers_own_chat_template(tmp_path: Path) -> None:
    dataset = load(
        DatasetConfig(data_path=write(tmp_path, row("1", "2"))),
        tokenizer=make_tokenizer(template=TEMPLATE),
        chat=TokenizerConfig(name="tiny"),
    )
    assert dataset.tokens[0].tolist() == ids("[user]1")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("default", "set policy.tokenizer.chat_template: null"),
        ("no_such_file.jinja", "must be 'default', null, a Jinja template, or the path"),
        ("{{ raise_exception('no system role') }}", "cannot render the prompts: no system role"),
        ("{% for %}", "cannot render the prompts"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_an_error(tmp_path: Path, template: str, problem: str) -> None:
    chat = TokenizerConfig(name="tiny", chat_template=template)
    with pytest.raises(ValueError, match=problem):
        load(DatasetConfig(data_path=write(tmp_path, row("1", "2"))), chat=chat)


def test_a_split_parts_the_rows_by_its_seed_in_file_order() -> None:
    dataset = make_dataset(40)
    rest, aside = dataset.split(0.25, seed=3)
    assert (len(rest), len(aside)) == (30, 10)
    assert sorted([*rest.texts, *aside.texts]) == sorted(dataset.texts)
    for part in (rest, aside):
        places = [int(text.removeprefix("text ")) for text in part.texts]
        assert places == sorted(places)
        assert part.answers == tuple(f"answer {place}" for place in places)
        assert part.prompt_ids.tolist() == [dataset.prompt_ids[place] for place in places]
        assert [part.tokens[row].tolist() for row in range(len(part))] == [
            dataset.tokens[place].tolist() for place in places
        ]
    assert dataset.split(0.25, seed=3)[1].texts == aside.texts
    assert dataset.split(0.25, seed=4)[1].texts != aside.texts


@pytest.mark.parametrize(("fraction", "count"), [(0.01, 0), (0.99, 10)])
def test_a_split_that_would_leave_a_part_empty_is_refused(fraction: float, count: int) -> None:
    with pytest.raises(ValueError, match=f"is {fraction}, which sets {count} of 10 prompts aside"):
        make_dataset(10).split(fraction, seed=0)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("solve it", r"it must hold \{\} once.* none"),
        ("{} and {}", r"it has 2 places"),
        (r"\boxed{answer} {}", r"\{answer\}, \{\}"),
        ("{} or {", "write other braces as"),
    ],
)
def test_a_prompt_file_needs_one_place_for_the_prompt(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "prompt.txt").write_text(content)
    config = DatasetConfig(data_path=write(tmp_path, row("1", "2")), prompt_file=str(tmp_path / "prompt.txt"))
    with pytest.raises(ValueError, match=problem):
        load(config)


def test_bad_rows_are_counted_and_the_first_five_shown_with_file_and_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        row("1", "2"),
        "{'input': 1}",
        "",
        "[1, 2]",
        {"input": "1", "label": "2"},
        row(["1"], "2"),
        row(" ", "2"),
        row("1", True),
        row("1", float("nan")),
    )
    with pytest.raises(ValueError) as caught:
        load(DatasetConfig(data_path=path))
    message = str(caught.value)
    assert message.startswith(f"{path}: 7 bad rows\n  {path}:2: not JSON (")
    assert f"{path}:4: a list; each line must be one JSON object" in message
    assert f"{path}:5: no key 'output', only 'input', 'label'; set output_key" in message
    assert f"{path}:6: 'input' is a list; it must be a string" in message
    assert f"{path}:7: 'input' is empty; remove the row" in message
    assert message.endswith("and 2 more")


@pytest.mark.parametrize("answer", [True, None, ["2"], float("inf")])
def test_an_answer_is_a_string_or_a_finite_number(tmp_path: Path, answer: object) -> None:
    with pytest.raises(ValueError, match=r":1: 'output' is .* must be a string or a finite number"):
        load(DatasetConfig(data_path=write(tmp_path, row("1", answer))))


def test_bytes_that_are_not_text_name_their_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"input": "1", "output": "2"}\n{"input": "\xff", "output": "2"}\n')
    with pytest.raises(ValueError, match=r"data\.jsonl:2: not JSON"):
        load(DatasetConfig(data_path=str(path)))


def test_a_missing_or_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data_path is .*nowhere\.jsonl'; there is no such file"):
        load(DatasetConfig(data_path=str(tmp_path / "nowhere.jsonl")))
    with pytest.raises(ValueError, match="has no rows"):
        load(DatasetConfig(data_path=write(tmp_path, "", " ")))


def test_repeated_prompts_share_an_id_and_are_counted_once_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, row("1", "a"), row("2", "b"), row("1", "a"), row("1", "a"))
    with caplog.at_level(logging.WARNING):
        dataset = load(DatasetConfig(data_path=path))
    assert len(dataset) == 4
    assert dataset.prompt_ids[[0, 2, 3]].tolist() == [dataset.prompt_ids[0]] * 3
    assert dataset.prompt_ids[0] != dataset.prompt_ids[1]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: 2 of 4 prompts repeat an earlier one; they share its history"
    ]


def test_one_prompt_with_two_answers_is_an_error_that_names_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path, row("2", "a"), "", row("1", "a"), row("1", "a"), row("1", "b"))
    with pytest.raises(ValueError, match=r"1 bad rows\n.*data\.jsonl:5: the prompt of line 3 with another answer"):
        load(DatasetConfig(data_path=path))


def test_prompts_that_are_too_long_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, row("123", "a"), row("1", "b"), row("12", "c"))
    with caplog.at_level(logging.WARNING):
        dataset = load(DatasetConfig(data_path=path), max_prompt_tokens=3)
    assert dataset.texts == ("1", "12")
    assert dataset.tokens.lengths.tolist() == [2, 3]
    assert "dropped 1 of 3 prompts, longer than 3 tokens" in caplog.text
    with pytest.raises(ValueError, match=r"all 3 prompts are longer than 1 tokens \(the shortest has 2\)"):
        load(DatasetConfig(data_path=path), max_prompt_tokens=1)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 30), prompts=st.integers(1, 12), shuffle=st.booleans(), seed=st.integers(0, 5))
def test_every_epoch_covers_every_prompt_exactly_once(rows: int, prompts: int, shuffle: bool, seed: int) -> None:
    stream = make_stream(make_dataset(rows), prompts=prompts, shuffle=shuffle, seed=seed)
    texts = [text for _ in range(3 * rows) for text in stream.next_batch().texts]
    for epoch in range(3):
        assert sorted(texts[epoch * rows : (epoch + 1) * rows]) == sorted(make_dataset(rows).texts)


def test_the_order_depends_on_seed_and_epoch_and_is_that_of_the_file_unshuffled() -> None:
    dataset = make_dataset(50)

    def epochs(*, shuffle: bool, seed: int) -> tuple[tuple[str, ...], ...]:
        stream = make_stream(dataset, prompts=50, shuffle=shuffle, seed=seed)
        return tuple(stream.next_batch().texts for _ in range(2))

    assert epochs(shuffle=True, seed=1) == epochs(shuffle=True, seed=1)
    assert len({*epochs(shuffle=True, seed=1), *epochs(shuffle=True, seed=2), dataset.texts}) == 5
    assert epochs(shuffle=False, seed=1) == (dataset.texts, dataset.texts)


@pytest.mark.parametrize("taken", [0, 1, 3, 7])
def test_a_restored_stream_goes_on_with_the_same_batches(taken: int) -> None:
    dataset = make_dataset(10, distinct=8)
    stream = make_stream(dataset)
    for _ in range(taken):
        stream.next_batch()
    state = json.loads(json.dumps(stream.state()))
    restored = make_stream(dataset)
    restored.restore(state)
    for _ in range(4):
        expected, batch = stream.next_batch(), restored.next_batch()
        assert batch.texts == expected.texts
        np.testing.assert_array_equal(batch.tokens.values, expected.tokens.values)
        np.testing.assert_array_equal(batch.occurrences, expected.occurrences)


def test_a_stream_over_other_data_is_not_restored() -> None:
    state = make_stream(make_dataset(10)).state()
    with pytest.raises(ValueError, match=r"has 10 prompts, data.train.data_path gives 9"):
        make_stream(make_dataset(9)).restore(state)


def test_occurrences_count_the_same_prompt_earlier_in_the_batch() -> None:
    dataset = make_dataset(5, distinct=3)
    batch = make_stream(dataset, prompts=12).next_batch()
    seen: dict[int, int] = {}
    for prompt_id, occurrence in zip(batch.prompt_ids.tolist(), batch.occurrences.tolist(), strict=True):
        assert occurrence == seen.get(prompt_id, 0)
        seen[prompt_id] = occurrence + 1
    assert sum(seen.values()) == 12


def test_each_row_of_a_batch_is_one_row_of_the_data() -> None:
    dataset = make_dataset(9)
    batch = make_stream(dataset, prompts=6).next_batch()
    for place, text in enumerate(batch.texts):
        source = dataset.texts.index(text)
        assert batch.answers[place] == dataset.answers[source]
        assert batch.prompt_ids[place] == dataset.prompt_ids[source]
        assert batch.tokens[place].tolist() == dataset.tokens[source].tolist()
    assert batch.weights.tolist() == [1.0] * 6


@pytest.mark.parametrize(("prompts", "minibatches"), [(8, 1), (8, 4), (7, 3), (5, 5)])
def test_minibatches_are_contiguous_chunks_as_equal_as_can_be(prompts: int, minibatches: int) -> None:
    batch = make_stream(make_dataset(20), prompts=prompts, minibatches=minibatches).next_batch()
    assert batch.minibatches.tolist() == [place * minibatches // prompts for place in range(prompts)]
    assert batch.num_candidates.tolist() == [batch.minibatches.tolist().count(m) for m in range(minibatches)]
    assert np.ptp(batch.num_candidates) <= 1


@pytest.mark.parametrize("minibatches", [0, 5])
def test_a_mini_batch_without_prompts_is_refused(minibatches: int) -> None:
    with pytest.raises(ValueError, match="each needs at least one prompt"):
        make_stream(make_dataset(20), prompts=4, minibatches=minibatches)


@pytest.mark.parametrize(("rows", "steps"), [(8, 2), (9, 3), (3, 1)])
def test_steps_per_epoch_see_every_prompt(rows: int, steps: int) -> None:
    stream = make_stream(make_dataset(rows))
    assert stream.steps_per_epoch == steps
    assert len({text for _ in range(steps) for text in stream.next_batch().texts}) == rows


@pytest.mark.parametrize(("max_samples", "expected"), [(4, 4), (50, 10)])
def test_validation_takes_the_first_prompts_in_file_order(max_samples: int, expected: int) -> None:
    dataset = make_dataset(10, distinct=3)
    batch = validation_batch(dataset, max_samples=max_samples)
    assert batch.texts == dataset.texts[:expected]
    assert batch.num_candidates.tolist() == [expected]
    assert batch.occurrences.tolist() == [place // 3 for place in range(expected)]


@pytest.mark.parametrize("chat_template", [None, TEMPLATE])
def test_a_prompt_on_which_the_tokenizer_fails_is_named_by_file_and_line(
    chat_template: str | None, tmp_path: Path
) -> None:
    known = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate("12+=[user]")}))
    known.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    path = write(tmp_path, row("1+1=", "2"), "", row("2+1=", "3"), row("2+x=", "3"), row("y", "3"))
    message = rf"{path}:4: the tokenizer of narrow fails on this prompt: Exception: .*[Uu][Nn][Kk]"
    with pytest.raises(ValueError, match=message):
        load(
            DatasetConfig(data_path=path),
            tokenizer=PreTrainedTokenizerFast(tokenizer_object=known),
            chat=TokenizerConfig(name="narrow", chat_template=chat_template),
        )


def test_half_a_character_is_refused_by_line(tmp_path: Path) -> None:
    path = write(
        tmp_path, row("1+1=", "2"), '{"input": "1\\ud800", "output": "3"}', '{"input": "1", "output": "\\udc00"}'
    )
    with pytest.raises(ValueError, match=r"2 bad rows\n.*:2: a text holds half of a surrogate pair(.|\n)*:3: "):
        load(DatasetConfig(data_path=path))
