"""Prompts as token ids: the file's templates, the chat template, and a tokenizer that may fail."""

from collections.abc import Sequence
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from dppo_megatron.config.schema import DatasetConfig, TokenizerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenizerError(Exception):
    """What a tokenizer said of the text ``index``."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


def encode_prompts(
    texts: Sequence[str],
    *,
    config: DatasetConfig,
    tokenizer: "PreTrainedTokenizerBase",
    tokenizer_config: TokenizerConfig,
) -> list[list[int]]:
    """Token ids of each prompt, templates applied, in one call of the tokenizer.

    Raises ValueError for templates that cannot be used, TokenizerError for a prompt on which the tokenizer fails.
    """
    prompt_template = _read_prompt_file(config.prompt_file)
    system = None if config.system_prompt_file is None else _read_file(config.system_prompt_file)
    prompts = [prompt_template.format(text) for text in texts]
    if tokenizer_config.chat_template is None:
        prompts = [(system or "") + prompt for prompt in prompts]
        prefix = _special_prefix(prompts, tokenizer=tokenizer)
    else:
        prompts = _apply_chat_template(prompts, system=system, tokenizer=tokenizer, tokenizer_config=tokenizer_config)
        prefix = []  # a chat template writes its own special tokens
    return [prefix + ids for ids in _token_ids(prompts, tokenizer=tokenizer, add_special_tokens=False)]


def _token_ids(
    texts: Sequence[str], *, tokenizer: "PreTrainedTokenizerBase", add_special_tokens: bool
) -> list[list[int]]:
    try:
        return tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
    except Exception as error:  # tokenizers, which is written in Rust, raises Exception itself
        if len(texts) == 1:
            raise TokenizerError(0, f"{type(error).__name__}: {error}") from error
    for index, text in enumerate(texts):
        try:
            _token_ids([text], tokenizer=tokenizer, add_special_tokens=add_special_tokens)
        except TokenizerError as error:
            raise TokenizerError(index, str(error)) from error
    raise RuntimeError("the tokenizer fails on all prompts together, and on none alone")


def _special_prefix(prompts: Sequence[str], *, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """What the tokenizer itself puts before a text (bos, or nothing), without what it may put after."""
    (full,) = _token_ids(prompts[:1], tokenizer=tokenizer, add_special_tokens=True)
    (bare,) = _token_ids(prompts[:1], tokenizer=tokenizer, add_special_tokens=False)
    return next(full[:cut] for cut in range(len(full) + 1) if full[cut : cut + len(bare)] == bare)


def _apply_chat_template(
    prompts: Sequence[str],
    *,
    system: str | None,
    tokenizer: "PreTrainedTokenizerBase",
    tokenizer_config: TokenizerConfig,
) -> list[str]:
    head = [] if system is None else [{"role": "system", "content": system}]
    try:
        rendered = tokenizer.apply_chat_template(
            [[*head, {"role": "user", "content": prompt}] for prompt in prompts],
            chat_template=_chat_template(tokenizer_config, tokenizer=tokenizer),
            add_generation_prompt=True,
            tokenize=False,
            **(tokenizer_config.chat_template_kwargs or {}),
        )
    except TemplateError as error:
        raise ValueError(f"policy.tokenizer.chat_template cannot render the prompts: {error}") from error
    return [str(prompt) for prompt in rendered]


def _chat_template(config: TokenizerConfig, *, tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """The Jinja template to use, None for the tokenizer's own."""
    template = config.chat_template
    assert template is not None
    if template == "default":
        if tokenizer.chat_template is None:
            raise ValueError(
                f"policy.tokenizer.chat_template is 'default', but the tokenizer of {config.name} has no chat "
                "template; set policy.tokenizer.chat_template: null for raw prompts, or give a template"
            )
        return None
    if "{{" in template or "{%" in template:
        return template
    if not Path(template).is_file():
        raise ValueError(
            f"policy.tokenizer.chat_template is {template!r}; it must be 'default', null, a Jinja template, "
            "or the path of a file that holds one"
        )
    return Path(template).read_text(encoding="utf-8")


def _read_prompt_file(path: str | None) -> str:
    """A template for str.format with one place for the prompt, ``{}``."""
    if path is None:
        return "{}"
    template = _read_file(path)
    try:
        places = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"prompt_file {path}: {error}; write other braces as {{{{ and }}}}") from error
    if places != [""]:
        raise ValueError(
            f"prompt_file {path}: it must hold {{}} once, for the prompt, and other braces as {{{{ and }}}}; "
            f"it has {len(places)} places: {', '.join('{' + name + '}' for name in places) or 'none'}"
        )
    return template


def _read_file(path: str) -> str:
    if not Path(path).is_file():
        raise ValueError(f"prompt_file or system_prompt_file is {path!r}; there is no such file")
    return Path(path).read_text(encoding="utf-8")
