r"""Prompts of rows: prompt files, named functions that turn a row into chat messages, and their tokens.

A prompt file is a text with one place for the question, `{}`. Other braces are read in one of two ways:

1. A file that is a format string of Python with `{}` as its only field is read as one, as NeMo-RL does: `{{` and `}}`
   stand for single braces, so that `\boxed{{}}` becomes `\boxed{}`.
2. Any other file is plain text: braces stand for themselves, and a `{}` that follows a LaTeX command, as in
   `\boxed{}`, is no place for the question.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.data.encoding import missing_bos, render
from nemo_offload_rl.data.records import Message, Prompt, Row
from nemo_offload_rl.data.tokenizer import read_text_file
from nemo_offload_rl.data.tools import check_shown
from nemo_offload_rl.errors import DataError, UserCodeError
from nemo_offload_rl.keys.data_source import TaskKeys
from nemo_offload_rl.targets import UserCode, is_target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AFTER_COMMAND = re.compile(r"\\[A-Za-z]+\*?$")
_PLACE = re.compile(r"(?<!\{)\{\}|\{\}(?!\})")


@dataclass(frozen=True)
class PromptFile:
    """The text before and after the question."""

    before: str
    after: str

    def fill(self, question: str) -> str:
        """The prompt of one question."""
        return f"{self.before}{question}{self.after}"


@dataclass(frozen=True, kw_only=True)
class PromptTemplates:
    """Contents of the prompt files; None if there is none."""

    prompt: PromptFile | None
    system: str | None


def load_templates(task: TaskKeys) -> PromptTemplates:
    """Read the prompt files.

    Raises:
        DataError: A file cannot be read, or the prompt file does not have exactly one place for the question.
    """
    system = task.system_prompt_file
    return PromptTemplates(
        prompt=None if task.prompt_file is None else read_prompt_file(task.prompt_file),
        system=None if system is None else read_text_file(system, "system_prompt_file"),
    )


def read_prompt_file(path: str) -> PromptFile:
    """Read and split a prompt file; errors as in `load_templates`."""
    text = read_text_file(path, "prompt_file")
    return _as_format_string(text) or _as_plain_text(text, path)


def _as_format_string(text: str) -> PromptFile | None:
    """None unless the text is a format string whose only field is `{}`, not after a LaTeX command."""
    try:
        pieces = list(string.Formatter().parse(text))
    except ValueError:
        return None
    fields = [index for index, (_, name, _, _) in enumerate(pieces) if name is not None]
    if len(fields) != 1:
        return None
    literal, *field = pieces[fields[0]]
    if field != ["", "", None] or _AFTER_COMMAND.search(literal):
        return None
    literals = [piece[0] for piece in pieces]
    return PromptFile("".join(literals[: fields[0] + 1]), "".join(literals[fields[0] + 1 :]))


def _as_plain_text(text: str, path: str) -> PromptFile:
    places = [match for match in _PLACE.finditer(text) if not _AFTER_COMMAND.search(text[: match.start()])]
    if len(places) != 1:
        raise DataError(
            f"prompt file {path} has {len(places)} places marked {{}} (after a LaTeX command, as in \\boxed{{}}, it is "
            "text): the question needs exactly one; mark it, or set prompt_file to null"
        )
    if "{{}}" in text:
        raise DataError(
            f"prompt file {path} has both {{{{}}}} and single braces, so it is unclear which are literal; write every "
            "literal brace twice, or every one once"
        )
    return PromptFile(text[: places[0].start()], text[places[0].end() :])


# -- messages of a row -------------------------------------------------------------------------------------------------

type Processor = Callable[[Row, PromptTemplates], list[Message]]


def question_and_prompt_file(row: Row, templates: PromptTemplates) -> list[Message]:
    """The row's messages, or one user message with its question, with the prompt files applied."""
    return with_prompt_files(row.messages or ({"role": "user", "content": row.question},), templates)


def with_system_prompt(messages: Sequence[Message], templates: PromptTemplates) -> list[Message]:
    """The messages after the system prompt, unless there is none or they begin with their own."""
    if templates.system is None or messages[0]["role"] == "system":
        return list(messages)
    return [{"role": "system", "content": templates.system}, *messages]


def with_prompt_files(messages: Sequence[Message], templates: PromptTemplates) -> list[Message]:
    """Add the system prompt, and put the user's first message into the prompt file."""
    changed = with_system_prompt(messages, templates)
    first = next((index for index, message in enumerate(changed) if message["role"] == "user"), None)
    if templates.prompt is not None and first is not None:
        changed[first] = {**changed[first], "content": templates.prompt.fill(changed[first]["content"])}
    return changed


PROCESSORS: Mapping[str, Processor] = {
    "math_hf_data_processor": question_and_prompt_file,
    "sft_processor": question_and_prompt_file,
}


def processor_named(name: str | None) -> Processor:
    """A processor of this package, or a user's named as `path/to/file.py:name` or `module.name`.

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
    """Wrap a user's function `(prompt, answer, **row)`; text that it returns becomes a user message.

    `prompt` is the row's messages if it has any.
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


# -- tokens ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """Turns rows into prompts for one task and one tokenizer.

    Attributes:
        tokenizer: A Hugging Face tokenizer with a chat template.
        task: Processor, prompt files and environment.
        templates: The prompt files' contents.
        add_bos: Begin with the begin token if there is one and the template does not write it.
        chat_template_kwargs: Extra variables for the chat template.
        data_set: Its name in metrics.
    """

    tokenizer: PreTrainedTokenizerBase
    task: TaskKeys
    templates: PromptTemplates
    add_bos: bool
    chat_template_kwargs: Mapping[str, Any]
    data_set: str

    def prompt(self, row: Row) -> Prompt:
        """Render and tokenize one row.

        Raises:
            DataError: The chat template fails or leaves a tool out.
        """
        messages = processor_named(self.task.processor)(row, self.templates)
        kwargs = self.chat_template_kwargs if row.tools is None else {**self.chat_template_kwargs, "tools": row.tools}
        text = render(self.tokenizer, messages, row.origin, add_generation_prompt=True, kwargs=kwargs)
        if row.tools is not None or row.messages is not None:
            check_shown(text, messages, row.tools, row.origin)
        token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        if self.add_bos and (bos := missing_bos(self.tokenizer, token_ids)):
            token_ids, text = (*bos, *token_ids), f"{self.tokenizer.bos_token}{text}"
        assert self.task.env_name is not None
        return Prompt(
            token_ids=token_ids,
            text=text,
            reference_answer=row.answer,
            env_name=self.task.env_name,
            metadata=row.metadata,
            data_set=self.data_set,
            question=row.question,
            messages=row.messages,
        )
