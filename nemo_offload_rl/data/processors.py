"""Named functions that turn a row into chat messages, and what makes prompts of the messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.data.encoding import render
from nemo_offload_rl.data.records import Message, Prompt, Row
from nemo_offload_rl.data.settings import TaskSettings
from nemo_offload_rl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACEHOLDER = "{}"


@dataclass(frozen=True, kw_only=True)
class PromptTemplates:
    """Contents of the prompt files; None where there is none. `prompt` has one `{}` where the question goes."""

    prompt: str | None
    system: str | None


type Processor = Callable[[Row, PromptTemplates], list[Message]]


def question_and_prompt_file(row: Row, templates: PromptTemplates) -> list[Message]:
    """The system prompt, if any, and one user message: the question put into the prompt file."""
    question = row.question
    if templates.prompt is not None:
        before, _, after = templates.prompt.partition(_PLACEHOLDER)
        question = f"{before}{question}{after}"
    user = {"role": "user", "content": question}
    if templates.system is None:
        return [user]
    return [{"role": "system", "content": templates.system}, user]


def with_system_prompt(messages: Sequence[Message], templates: PromptTemplates) -> list[Message]:
    """The messages, after the system prompt where there is one and they do not begin with their own."""
    if templates.system is None or messages[0]["role"] == "system":
        return list(messages)
    return [{"role": "system", "content": templates.system}, *messages]


PROCESSORS: Mapping[str, Processor] = {
    "math_hf_data_processor": question_and_prompt_file,
    "sft_processor": question_and_prompt_file,
}


def load_templates(task: TaskSettings) -> PromptTemplates:
    """Read the prompt files.

    Raises:
        DataError: A file is missing, or the prompt file does not have exactly one `{}`.
    """
    prompt = _read_template(task.prompt_file, "prompt_file")
    if prompt is not None and prompt.count(_PLACEHOLDER) != 1:
        raise DataError(
            f"prompt file {task.prompt_file} has {prompt.count(_PLACEHOLDER)} places marked {{}}: the question goes to "
            f"exactly one; mark it, or set prompt_file to null"
        )
    return PromptTemplates(prompt=prompt, system=_read_template(task.system_prompt_file, "system_prompt_file"))


def processor_named(name: str | None) -> Processor:
    """The processor of that name.

    Raises:
        DataError: There is none.
    """
    if name is None or name not in PROCESSORS:
        raise DataError(f"processor {name!r} is unknown; set data.default.processor to one of: {', '.join(PROCESSORS)}")
    return PROCESSORS[name]


@dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """Turns rows into prompts for one task and one tokenizer.

    Attributes:
        tokenizer: A Hugging Face tokenizer with a chat template.
        task: Processor, prompt files and environment.
        templates: The prompt files' contents.
        max_input_seq_length: Longest prompt allowed, in tokens.
        chat_template_kwargs: Extra variables for the chat template.
        data_set: What metrics call the data set.
    """

    tokenizer: PreTrainedTokenizerBase
    task: TaskSettings
    templates: PromptTemplates
    max_input_seq_length: int
    chat_template_kwargs: Mapping[str, Any]
    data_set: str

    def prompt(self, row: Row) -> Prompt:
        """Render and tokenize one row.

        Raises:
            DataError: The chat template fails, or the prompt is longer than the limit.
        """
        messages = processor_named(self.task.processor)(row, self.templates)
        text = render(
            self.tokenizer, messages, row.origin, add_generation_prompt=True, kwargs=self.chat_template_kwargs
        )
        token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        if len(token_ids) > self.max_input_seq_length:
            raise DataError(
                f"{row.origin}: the prompt has {len(token_ids)} tokens, more than data.max_input_seq_length="
                f"{self.max_input_seq_length}; raise the limit or take the row out"
            )
        assert self.task.env_name is not None
        return Prompt(
            token_ids=token_ids,
            text=text,
            reference_answer=row.answer,
            env_name=self.task.env_name,
            metadata=row.metadata,
            data_set=self.data_set,
        )


def encode_prompts(encoder: PromptEncoder, rows: Sequence[Row]) -> tuple[Prompt, ...]:
    """Prompts of all rows, in their order."""
    return tuple(encoder.prompt(row) for row in rows)


def _read_template(path: str | None, setting: str) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{setting} {path} cannot be read: {error.strerror}; correct the path or set null") from error
