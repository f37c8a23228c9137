"""Claims about loading: inheritance, overrides, defaults, types, and what the errors say."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from dppo_megatron.config.loader import ConfigError, load_config, load_container
from dppo_megatron.config.schema import Config, DppoConfig

MINIMAL = """
policy: {model_name: some/model}
data:
  train: {data_path: train.jsonl}
"""


def write(folder: Path, *, name: str = "run.yaml", text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return path


def problems(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    texts = tuple(map(str, caught.value.problems))
    assert str(caught.value) == "\n".join(texts)
    return texts


def test_later_defaults_win_and_the_file_itself_wins_over_all(tmp_path: Path) -> None:
    write(tmp_path, name="base/one.yaml", text="x: {a: 1, b: 1, c: 1, l: [1, 2, 3]}")
    write(tmp_path, name="base/two.yaml", text="defaults: ../deep.yaml\nx: {b: 2, c: 2, l: [9]}")
    write(tmp_path, name="deep.yaml", text="x: {c: 0, d: 0}")
    path = write(tmp_path, text="defaults: [base/one.yaml, base/two.yaml]\nx: {c: 3}")
    assert load_container(path) == {"x": {"a": 1, "b": 2, "c": 3, "d": 0, "l": [9]}}


def test_files_are_listed_in_the_order_of_merging(tmp_path: Path) -> None:
    base = write(tmp_path, name="base.yaml", text=MINIMAL)
    path = write(tmp_path, text="defaults: base.yaml")
    assert load_config(path).files == (base, path)


def test_override_marker_replaces_a_block_at_the_top_level_alone(tmp_path: Path) -> None:
    write(tmp_path, name="base.yaml", text="x: {a: 1}\ny: {z: {a: 1}}")
    path = write(tmp_path, text="defaults: base.yaml\nx: {_override_: true, b: 2}\ny: {z: {_override_: true}}")
    assert load_container(path) == {"x": {"b": 2}, "y": {"z": {"a": 1, "_override_": True}}}


def test_a_cycle_of_defaults_is_an_error_that_names_it(tmp_path: Path) -> None:
    a = write(tmp_path, name="a.yaml", text="defaults: b.yaml")
    b = write(tmp_path, name="b.yaml", text="\ndefaults: a.yaml")
    (problem,) = problems(a)
    assert problem.startswith(f"{b}:2: defaults = ")
    assert f": a cycle of defaults: {a} <- {b} <- {a}; leave" in problem


def test_a_missing_base_names_the_chain(tmp_path: Path) -> None:
    b = write(tmp_path, name="b.yaml", text="defaults: none.yaml")
    a = write(tmp_path, name="a.yaml", text="defaults: b.yaml")
    missing = tmp_path / "none.yaml"
    (problem,) = problems(a)
    assert problem.startswith(f"{b}:1: defaults = ")
    assert f": no such file; the chain is {missing} <- {b} <- {a}; give" in problem


def test_interpolations_stay_lazy_through_inheritance_and_overrides(tmp_path: Path) -> None:
    text = """
    n: 2
    twice: ${mul:${n}, 2}
    block: {a: "${.b}", b: "${n}", ratio: "${div:${n}, 4}", top: "${max:${n}, 3}", sum: "${add:${n}, 1}"}
    """
    write(tmp_path, name="base.yaml", text=text)
    path = write(tmp_path, text="defaults: base.yaml\nn: 3")
    block = {"a": 5, "b": 5, "ratio": 1.25, "top": 5, "sum": 6}
    assert load_container(path, ["n=5"]) == {"n": 5, "twice": 10, "block": block}


def test_an_environment_variable_can_be_interpolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADER_TEST_DIR", "/somewhere")
    path = write(tmp_path, text='x: "${oc.env:LOADER_TEST_DIR}/data"')
    assert load_container(path) == {"x": "/somewhere/data"}


def test_every_unresolvable_interpolation_is_reported_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, text=MINIMAL + "grpo:\n  seed: ${nope}\n  val_period: ${.nothing}\n")
    first, second = problems(path)
    assert first.startswith(f"{path}:6: grpo.seed = '${{nope}}': ")
    assert second.startswith(f"{path}:7: grpo.val_period = '${{.nothing}}': ")


def test_numbers_with_exponents_are_floats(tmp_path: Path) -> None:
    path = write(tmp_path, text="a: 5.0e-6\nb: 1e-8\nc: 1e3\nd: '1e3'")
    assert load_container(path) == {"a": 5e-6, "b": 1e-8, "c": 1000.0, "d": "1e3"}


def test_duplicate_keys_are_an_error_with_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path, text="a:\n  b: 1\n  c: 2\n  b: 3\n")
    assert problems(path) == (f"{path}:4: a.b = None: set twice in one block; first at line 2; keep one",)


def test_text_that_is_not_yaml_is_an_error_with_its_line(tmp_path: Path) -> None:
    (problem,) = problems(write(tmp_path, text="a: 1\nb: [1\nc: 2\n"))
    assert problem.startswith(f"{tmp_path / 'run.yaml'}:3: not YAML")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("a.b=2", {"b": 2, "n": None, "l": [1, 2]}),
        ("a.n=1e-3", {"b": 1, "n": 1e-3, "l": [1, 2]}),
        ("+a.n=4", {"b": 1, "n": 4, "l": [1, 2]}),
        ("+a.c={x: y}", {"b": 1, "n": None, "l": [1, 2], "c": {"x": "y"}}),
        ("++a.b=null", {"b": None, "n": None, "l": [1, 2]}),
        ("~a.l", {"b": 1, "n": None}),
        ("a.l=[7]", {"b": 1, "n": None, "l": [7]}),
        ("a.l.0=7", {"b": 1, "n": None, "l": [7, 2]}),
        ("a.b='1,2'", {"b": "1,2", "n": None, "l": [1, 2]}),
    ],
)
def test_an_override_does_what_hydra_says(tmp_path: Path, override: str, value: object) -> None:
    path = write(tmp_path, text="a: {b: 1, n: null, l: [1, 2]}")
    assert load_container(path, [override]) == {"a": value}


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("a.c=1", "no such key; write +a.c=1 to add it"),
        ("a.n.c=1", "no such key"),
        ("+a.b=1", "a.b exists already"),
        ("~a.c", "no such key"),
        ("~a.b=2", "the value is 1"),
        ("a.b=1,2", "a sweep"),
        ("a.b=range(1,3)", "a sweep"),
        ("a@b=1", "@ selects a package"),
        ("a.b=x=y", "not an override"),
    ],
)
def test_a_wrong_override_is_an_error_that_quotes_it(tmp_path: Path, override: str, reason: str) -> None:
    path = write(tmp_path, text="a: {b: 1, n: null}")
    with pytest.raises(ConfigError) as caught:
        load_container(path, [override])
    (problem,) = map(str, caught.value.problems)
    assert problem.startswith("override ")
    assert reason in problem


def test_a_plain_override_may_name_what_only_the_schema_has(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, text=MINIMAL), ["grpo.seed=7", "dppo.prompt_pruning.rate=0.1"])
    assert loaded.config.grpo.seed == 7
    assert loaded.config.dppo.prompt_pruning.rate == 0.1
    assert loaded.container["grpo"] == {"seed": 7}


def test_a_mistyped_key_of_ours_in_an_override_gets_the_nearest_key(tmp_path: Path) -> None:
    (problem,) = problems(write(tmp_path, text=MINIMAL), "dppo.completion_pruning.rat=0.1")
    assert problem == (
        "override dppo.completion_pruning.rat=0.1: dppo.completion_pruning.rat = 0.1: "
        "unknown key; the nearest known one is dppo.completion_pruning.rate"
    )


def test_a_refused_override_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write(tmp_path, text=MINIMAL)
    assert len(problems(path, "policy={model_name: 5, bogus: 1}")) == 1


def test_container_holds_what_the_file_says_and_effective_all_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path, text=MINIMAL)
    loaded = load_config(path)
    assert loaded.container == yaml.safe_load(MINIMAL)
    assert loaded.effective["grpo"]["num_prompts_per_step"] == 32
    assert loaded.effective["policy"]["megatron_cfg"]["scheduler"]["start_weight_decay"] == 0.01


def test_the_effective_container_loads_to_the_same_configuration(tmp_path: Path) -> None:
    text = MINIMAL + "  default: {input_key: question}\ndppo: {sampler: bernoulli}\n"
    loaded = load_config(write(tmp_path, text=text), ["policy.generation.stop_token_ids=[3,4]"])
    again = load_config(write(tmp_path, name="again.yaml", text=yaml.safe_dump(loaded.effective)))
    assert again.config == loaded.config
    assert again.container == loaded.effective


def test_every_default_is_that_of_the_schema(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, text=MINIMAL)).config
    follower = {"policy.tokenizer.name", "data.train.seed", "policy.generation.max_new_tokens"}
    follower |= {"policy.generation.val_temperature"}
    follower |= {"policy.megatron_cfg.pipeline_dtype", "data.max_input_seq_length"}
    follower |= {"policy.megatron_cfg.optimizer.clip_grad", "grpo.reward_shaping.max_response_length"}
    follower |= {f"policy.generation.vllm_cfg.{name}" for name in ("precision", "max_model_len")}
    follower |= {"policy.sequence_packing.logprob_mb_tokens"}
    follower |= {f"policy.megatron_cfg.scheduler.{end}_weight_decay" for end in ("start", "end")}
    seen = set()

    def compare(section: object, key: str) -> None:
        assert dataclasses.is_dataclass(section)
        for spec in dataclasses.fields(section):
            value, name = getattr(section, spec.name), f"{key}{spec.name}"
            if dataclasses.is_dataclass(value):
                compare(value, f"{name}.")
            elif isinstance(spec.default, str) and spec.default.startswith("${"):
                seen.add(name)
            elif spec.default is not dataclasses.MISSING and name != "dppo.enabled":
                assert value == spec.default, name

    compare(config, "")
    assert seen == follower
    assert config.policy.tokenizer.name == "some/model"
    assert config.policy.generation.max_new_tokens == config.policy.max_total_sequence_length == 512


def test_a_default_follows_the_key_that_it_names(tmp_path: Path) -> None:
    path = write(tmp_path, text=MINIMAL)
    config = load_config(path, ["policy.max_total_sequence_length=99", "policy.precision=float32"]).config
    assert config.policy.generation.max_new_tokens == 99
    assert config.policy.megatron_cfg.pipeline_dtype == "float32"


def test_dppo_is_off_without_its_block_and_on_with_it(tmp_path: Path) -> None:
    absent = load_config(write(tmp_path, text=MINIMAL)).config
    assert absent.dppo == DppoConfig(enabled=False)
    assert load_config(write(tmp_path, text=MINIMAL + "dppo: {}")).config.dppo == DppoConfig(enabled=True)
    assert not load_config(write(tmp_path, text=MINIMAL + "dppo: {enabled: false}")).config.dppo.enabled


def test_data_default_fills_what_train_and_validation_leave_open(tmp_path: Path) -> None:
    text = """
    policy: {model_name: some/model}
    data:
      default: {input_key: question, output_key: answer}
      train: {data_path: train.jsonl}
      validation: {data_path: val.jsonl, output_key: solution}
    """
    loaded = load_config(write(tmp_path, text=text))
    train, validation = loaded.config.data.train, loaded.config.data.validation
    assert validation is not None
    assert (train.input_key, train.output_key) == ("question", "answer")
    assert (validation.input_key, validation.output_key) == ("question", "solution")
    assert loaded.where("data.train.input_key").endswith(":4")
    assert "default" not in loaded.effective["data"]


def test_an_unknown_key_of_data_default_is_reported_once(tmp_path: Path) -> None:
    (problem,) = problems(write(tmp_path, text=MINIMAL + "  default: {inputkey: q}\n"))
    assert problem.endswith(
        "data.default.inputkey = 'q': unknown key; the nearest known one is data.default.input_key"
    )


def test_values_are_converted_to_the_annotated_types(tmp_path: Path) -> None:
    text = MINIMAL + "loss_fn: {ratio_clip_min: 1, ratio_clip_c: null}\n"
    override = "+policy.tokenizer.chat_template_kwargs={think: true}"
    config = load_config(write(tmp_path, text=text), ["policy.generation.stop_token_ids=[1,2]", override]).config
    assert type(config.loss_fn.ratio_clip_min) is float
    assert config.loss_fn.ratio_clip_c is None
    assert config.policy.generation.stop_token_ids == (1, 2)
    assert config.policy.tokenizer.chat_template_kwargs == {"think": True}


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("grpo.seed=true", "must be an integer"),
        ("grpo.seed=1.5", "must be an integer"),
        ("grpo.seed=null", "must be an integer"),
        ("grpo.overlong_filtering=1", "must be true or false"),
        ("loss_fn.ratio_clip_min=true", "must be a number"),
        ("loss_fn.ratio_clip_c=x", "must be a number or null"),
        ("policy.precision=float16", "must be one of float32, bfloat16"),
        ("policy.model_name=5", "must be a string"),
        ("policy.generation.stop_token_ids=[1,x]", "must be an integer"),
        ("policy.generation.stop_token_ids=1", "must be a list or null"),
        ("policy.tokenizer.chat_template_kwargs=3", "must be a block of keys or null"),
        ("policy.tokenizer=3", "must be a block of keys"),
        ("data.train=null", "must be a block of keys"),
        ("policy.model_name='???'", "mandatory, and not set"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error(tmp_path: Path, override: str, reason: str) -> None:
    (problem,) = problems(write(tmp_path, text=MINIMAL), override)
    key = override.partition("=")[0]
    assert problem.startswith(f"override {override}: {key}")
    assert f": {reason}; " in problem


def test_all_problems_of_a_file_are_reported_together(tmp_path: Path) -> None:
    text = """
    grpo:
      num_prompt_per_step: 7
      seed: many
    data:
      train: {}
    temperature: 1.0
    """
    path = write(tmp_path, text=text)
    assert set(problems(path, "grpo.nothing=1")) == {
        "override grpo.nothing=1: no such key; write +grpo.nothing=1 to add it",
        f"{path}:3: grpo.num_prompt_per_step = 7: unknown key; the nearest known one is grpo.num_prompts_per_step",
        f"{path}:4: grpo.seed = 'many': must be an integer; the default is 42",
        f"{path}:5: data.train.data_path: required, and not set; set it",
        f"{path}:7: temperature = 1.0: unknown key; the nearest known one is policy.generation.temperature",
        f"{path}: policy: required, and not set; set it",
    }


def test_where_names_the_place_that_had_the_last_word(tmp_path: Path) -> None:
    base = write(tmp_path, name="base.yaml", text=MINIMAL + "grpo:\n  seed: 1\n  val_period: 5\n")
    path = write(tmp_path, text="defaults: base.yaml\ngrpo:\n  seed: 2\n")
    loaded = load_config(path, ["policy.precision=float32"])
    assert loaded.where("grpo.seed") == f"{path}:3"
    assert loaded.where("grpo.val_period") == f"{base}:7"
    assert loaded.where("policy.precision") == "override policy.precision=float32"
    assert loaded.where("grpo.max_num_steps") == "default"


def test_a_replaced_block_leaves_no_places_behind(tmp_path: Path) -> None:
    write(tmp_path, name="base.yaml", text=MINIMAL + "grpo: {seed: 1}\n")
    path = write(tmp_path, text="defaults: base.yaml\ngrpo: {_override_: true, val_period: 3}\n")
    loaded = load_config(path)
    assert loaded.config.grpo.seed == 42
    assert loaded.where("grpo.seed") == "default"


def test_loading_does_not_import_torch() -> None:
    code = "import sys, dppo_megatron.config.loader, dppo_megatron.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_result_is_the_schema_s_own_class(tmp_path: Path) -> None:
    assert type(load_config(write(tmp_path, text=MINIMAL)).config) is Config
