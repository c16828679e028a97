"""Named functions that turn a row into chat messages, and what makes prompts of the messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.data.encoding import missing_bos, render
from nemo_offload_rl.data.prompt_file import PromptFile, read_prompt_file, read_text_file
from nemo_offload_rl.data.records import Message, Prompt, Row
from nemo_offload_rl.data.tools import check_shown
from nemo_offload_rl.errors import DataError, UserCodeError
from nemo_offload_rl.keys.data_source import TaskKeys
from nemo_offload_rl.targets import UserCode, is_target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

_MASKED_PROMPT_TOKENS = 4  # they only have to be answered; as many as NeMo-RL keeps of a message


@dataclass(frozen=True, kw_only=True)
class PromptTemplates:
    """Contents of the prompt files; None where there is none."""

    prompt: PromptFile | None
    system: str | None


type Processor = Callable[[Row, PromptTemplates], list[Message]]


def question_and_prompt_file(row: Row, templates: PromptTemplates) -> list[Message]:
    """The system prompt, if any, and one user message: the question put into the prompt file.

    Of a row with messages: these, as `with_prompt_files` changes them.
    """
    if row.messages is not None:
        return with_prompt_files(row.messages, templates)
    question = row.question
    if templates.prompt is not None:
        question = templates.prompt.fill(question)
    user = {"role": "user", "content": question}
    if templates.system is None:
        return [user]
    return [{"role": "system", "content": templates.system}, user]


def with_system_prompt(messages: Sequence[Message], templates: PromptTemplates) -> list[Message]:
    """The messages, after the system prompt where there is one and they do not begin with their own."""
    if templates.system is None or messages[0]["role"] == "system":
        return list(messages)
    return [{"role": "system", "content": templates.system}, *messages]


def with_prompt_files(messages: Sequence[Message], templates: PromptTemplates) -> list[Message]:
    """A conversation with the system prompt as above, and its first message of the user put into the prompt file."""
    changed = with_system_prompt(messages, templates)
    first = next((index for index, message in enumerate(changed) if message["role"] == "user"), None)
    if templates.prompt is not None and first is not None:
        changed[first] = {**changed[first], "content": templates.prompt.fill(changed[first]["content"])}
    return changed


PROCESSORS: Mapping[str, Processor] = {
    "math_hf_data_processor": question_and_prompt_file,
    "sft_processor": question_and_prompt_file,
}


def load_templates(task: TaskKeys) -> PromptTemplates:
    """Read the prompt files.

    Raises:
        DataError: A file is missing, or the prompt file does not have exactly one place for the question.
    """
    return PromptTemplates(
        prompt=None if task.prompt_file is None else read_prompt_file(task.prompt_file),
        system=None
        if task.system_prompt_file is None
        else read_text_file(task.system_prompt_file, "system_prompt_file"),
    )


def processor_named(name: str | None) -> Processor:
    """The processor of that name, or the one of a user's that it names as `path/to/file.py:name` or `module.name`.

    Raises:
        DataError: There is none.
        UserCodeError: A user's cannot be imported.
    """
    if name is not None and is_target(name):
        return _of_user(name)
    if name is None or name not in PROCESSORS:
        raise DataError(f"processor {name!r} is unknown; set data.default.processor to one of: {', '.join(PROCESSORS)}")
    return PROCESSORS[name]


@cache
def _of_user(target: str) -> Processor:
    """A function `(prompt, answer, **row)` of a user's: text is a message of the user, anything else messages.

    `prompt` is the row's messages where it has some.
    """
    code = UserCode.named("processor", target)

    def process(row: Row, templates: PromptTemplates) -> list[Message]:
        prompt = row.question if row.messages is None else [dict(message) for message in row.messages]
        given = {**row.metadata, "prompt": prompt, "answer": row.answer}
        code.check_named(given)
        made = code.call_named(given)
        messages = [{"role": "user", "content": made}] if isinstance(made, str) else made
        is_list = isinstance(messages, list) and bool(messages)
        if not is_list or not all(isinstance(entry, Mapping) and {"role", "content"} <= {*entry} for entry in messages):
            raise UserCodeError(
                f"{code.label} ({code.place}): of {row.origin} it made {str(made)[:60]!r}; return text, or a list of "
                "messages with `role` and `content`"
            )
        return with_prompt_files([dict(message) for message in messages], templates)

    return process


@dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """Turns rows into prompts for one task and one tokenizer.

    Attributes:
        tokenizer: A Hugging Face tokenizer with a chat template.
        task: Processor, prompt files and environment.
        templates: The prompt files' contents.
        max_input_seq_length: Longest prompt allowed, in tokens.
        overlong_rows: What a longer prompt is: "mask", "drop" or "error".
        add_bos: Begin with the begin token, where there is one and the template does not write it.
        chat_template_kwargs: Extra variables for the chat template.
        data_set: What metrics call the data set.
    """

    tokenizer: PreTrainedTokenizerBase
    task: TaskKeys
    templates: PromptTemplates
    max_input_seq_length: int
    overlong_rows: str
    add_bos: bool
    chat_template_kwargs: Mapping[str, Any]
    data_set: str

    def prompt(self, row: Row) -> Prompt:
        """Render and tokenize one row. One that is too long has `loss_multiplier` 0 and only its first tokens.

        Raises:
            DataError: The chat template fails or leaves a tool out, or the prompt is longer than the limit and that is
                an error.
        """
        messages = processor_named(self.task.processor)(row, self.templates)
        kwargs = self.chat_template_kwargs if row.tools is None else {**self.chat_template_kwargs, "tools": row.tools}
        text = render(self.tokenizer, messages, row.origin, add_generation_prompt=True, kwargs=kwargs)
        if row.tools is not None or row.messages is not None:
            check_shown(text, messages, row.tools, row.origin)
        token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        if self.add_bos and (bos := missing_bos(self.tokenizer, token_ids)):
            token_ids, text = (*bos, *token_ids), f"{self.tokenizer.bos_token}{text}"
        is_overlong = len(token_ids) > self.max_input_seq_length
        if is_overlong and self.overlong_rows == "error":
            raise DataError(
                f"{row.origin}: the prompt has {len(token_ids)} tokens, more than data.max_input_seq_length="
                f"{self.max_input_seq_length}; raise the limit, take the row out, or set data.overlong_rows to mask or "
                "drop"
            )
        assert self.task.env_name is not None
        return Prompt(
            token_ids=token_ids[:_MASKED_PROMPT_TOKENS] if is_overlong else token_ids,
            text=text,
            reference_answer=row.answer,
            env_name=self.task.env_name,
            metadata=row.metadata,
            data_set=self.data_set,
            loss_multiplier=0.0 if is_overlong else 1.0,
            question=row.question,
            messages=row.messages,
        )


def encode_prompts(encoder: PromptEncoder, rows: Sequence[Row]) -> tuple[Prompt, ...]:
    """Prompts of all rows, in their order; too long ones are counted, and left out if they are to be dropped.

    Raises:
        DataError: A row cannot be used, or all are too long.
    """
    unique = {id(row): row for row in rows}  # published data sets have the same row up to a hundred times
    encoded = {key: encoder.prompt(row) for key, row in unique.items()}
    prompts = [encoded[id(row)] for row in rows]
    overlong = [row.origin for row, prompt in zip(rows, prompts, strict=True) if not prompt.loss_multiplier]
    if not overlong:
        return tuple(prompts)
    limit, drops = encoder.max_input_seq_length, encoder.overlong_rows == "drop"
    if len(overlong) == len(rows):
        raise DataError(
            f"{overlong[0]}: this prompt and all others are longer than data.max_input_seq_length={limit} tokens; "
            "raise the limit"
        )
    logger.warning(
        "%d of %d prompts of %s are longer than data.max_input_seq_length=%d tokens, first %s: %s",
        len(overlong),
        len(rows),
        encoder.data_set,
        limit,
        overlong[0],
        "they are left out" if drops else "responses to them are not trained on",
    )
    return tuple(prompt for prompt in prompts if prompt.loss_multiplier or not drops)
