import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from tools import make_tiny_model as tool


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("made") / "nested" / "tiny"
    tool.make_tiny_model(output, seed=3, steps=20)
    return output


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_id_of_the_model_is_a_token_that_decodes_and_encodes_back(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    model = Qwen3ForCausalLM.from_pretrained(made)
    assert model.config.vocab_size == len(tokenizer) == 64
    assert model.model.embed_tokens.weight.shape == (64, 64)
    assert model.dtype == torch.float32
    texts = [tokenizer.decode([index]) for index in range(64)]
    assert [tokenizer.encode(text) for text in texts] == [[index] for index in range(64)]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 1)


def test_a_prompt_is_one_token_a_character_and_decodes_without_the_stop_token(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    ids = tokenizer.encode("70412=")
    assert tokenizer.convert_ids_to_tokens(ids) == list("70412=")
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "70412="


def test_answers_are_sorted_digits_and_validation_prompts_are_held_out(made: Path) -> None:
    train, validation = rows(made / "data" / "train.jsonl"), rows(made / "data" / "validation.jsonl")
    assert (len(train), len(validation)) == (2000, 256)
    for row in train + validation:
        assert row["input"][-1] == "="
        assert 3 <= len(row["input"]) - 1 <= 8
        assert row["output"] == "".join(sorted(row["input"][:-1]))
    prompts = [row["input"] for row in train + validation]
    assert len(set(prompts)) == len(prompts)


def test_the_same_seed_gives_the_same_files_and_another_seed_others(made: Path, tmp_path: Path) -> None:
    tool.make_tiny_model(tmp_path / "same", seed=3, steps=20)
    for name in tool.FILES:
        assert (tmp_path / "same" / name).read_bytes() == (made / name).read_bytes()
    tool.make_tiny_model(tmp_path / "other", seed=4, steps=1)
    for name in ("model.safetensors", "data/train.jsonl", "data/validation.jsonl"):
        assert (tmp_path / "other" / name).read_bytes() != (made / name).read_bytes()


def test_the_warm_start_imitates_right_reversed_and_descending_answers() -> None:
    stream = tool.random.Random(0)
    answers = [tool._imitated(tool.Problem("2413=", "1234"), stream).answer for _ in range(4000)]
    assert set(answers) == {"1234", "3142", "4321"}
    assert answers.count("1234") / 4000 == pytest.approx(0.35, abs=0.03)
    assert answers.count("3142") / 4000 == pytest.approx(0.325, abs=0.03)


def test_labels_are_the_answer_and_the_stop_token_alone() -> None:
    tokenizer = tool.make_tokenizer()
    tokens, labels = tool._encode([tool.Problem("31=", "13"), tool.Problem("9312=", "1239")], tokenizer)
    written = tokenizer.encode("31=13<eos>")
    assert tokens[0].tolist() == written + [0] * 4  # as long as the longest
    assert labels[0].tolist() == [-100] * 3 + written[3:] + [-100] * 4


def test_longer_lists_fit_a_model_that_was_made_for_them() -> None:
    problems = tool.make_problems(tool.random.Random(0), count=200, max_digits=200)
    assert max(len(problem.answer) for problem in problems) > 150
    model = tool.make_model(tool.make_tokenizer(), size="100k", head_dim=None, max_digits=200)
    assert model.config.max_position_embeddings >= 2 * 200 + 2


def test_exact_accuracy_is_the_probability_of_the_answer(made: Path) -> None:
    model, tokenizer = Qwen3ForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    problems = [tool.Problem("312=", "123"), tool.Problem("98765=", "56789")]
    tokens, labels = tool._encode(problems, tokenizer)
    expected = []
    for problem in problems:
        probability, context = 1.0, tokenizer.encode(problem.prompt)
        for token in tokenizer.encode(f"{problem.answer}<eos>"):
            with torch.no_grad():
                logits = model(torch.tensor([context])).logits[0, -1].double()
            probability *= torch.softmax(logits, 0)[token].item()
            context.append(token)
        expected.append(probability)
    assert tool.exact_accuracy(model, tokens=tokens, labels=labels) == pytest.approx(sum(expected) / 2, rel=1e-4)


def test_a_complete_directory_is_left_alone_and_another_one_refused(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (made / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(sys, "argv", ["make_tiny_model.py", str(made)])
    tool.main()
    assert "already complete" in capsys.readouterr().out
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ValueError, match="not an empty directory"):
        tool.make_tiny_model(tmp_path, seed=0, steps=1)


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tool, "_write_problems", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tool.make_tiny_model(tmp_path / "tiny", seed=0, steps=1)
    assert not list(tmp_path.iterdir())


def test_making_a_model_leaves_the_random_state_and_the_threads_alone(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.rand(1)  # away from where an earlier run with this seed may have left the stream
        state = torch.get_rng_state()
        tool.make_tiny_model(tmp_path / "tiny", seed=0, steps=1)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
