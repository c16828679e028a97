"""vLLM's chat completions, extended to keep the tokens of rollouts.

Three methods are extended: a request is sampled as the run's settings say, its prompt begins with the previous call's
tokens, and the engine's output is kept.
"""

import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, cast

from pydantic import PrivateAttr
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.error_response import create_error_response
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from nemo_offload_rl.data.encoding import TurnEncoder, missing_bos
from nemo_offload_rl.generation.served_rollouts import ServedPrompt, ServedRollout
from nemo_offload_rl.generation.vllm.requests import Answers, sampling_params
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.engine import Completion

# Parameters that can change the prompt or the distribution of tokens, with the values that change neither.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "use_beam_search": (False,),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "repetition_detection": (None,),
    "min_p": (None, 0),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
    "bad_words": ([],),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
    "prompt_logprobs": (None,),
    "truncate_prompt_tokens": (None,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "chat_template": (None,),
    "include_stop_str_in_output": (False,),
    "documents": (None, []),
    "tool_choice": (None, "none", "auto"),
}


class Call:
    """One request of a rollout on its way through vLLM's methods.

    Args:
        rollout: Its rollout.
        request: The client's request; its token limit is moved into this object.
        uses_seeds: Each call has its own seed.
        records_logprobs: The engine's workers record logprobs.
    """

    def __init__(
        self, rollout: ServedRollout, request: ChatCompletionRequest, *, uses_seeds: bool, records_logprobs: bool
    ) -> None:
        self.rollout = rollout
        asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        # vLLM refuses a prompt that leaves no room for this many tokens; here the response is cut off instead.
        request.max_tokens = request.max_completion_tokens = None
        limit = rollout.sampling.max_new_tokens
        self._max_tokens = limit if asked is None else min(asked, limit)
        self._uses_seeds = uses_seeds
        self._records_logprobs = records_logprobs
        self._messages: Sequence[dict[str, Any]] = ()
        self._variables = {"tools": _tools(request), **(request.chat_template_kwargs or {})}
        self._prompt: ServedPrompt | None = None
        self.completion: Completion | None = None

    def prompt(self, messages: Sequence[Any], rendered: Sequence[int], turns: TurnEncoder) -> tuple[int, ...]:
        """Token ids of the prompt; see `ServedRollout.prompt`."""
        self._messages = list(messages)
        self._prompt = self.rollout.prompt(self._messages, self._variables, rendered, turns.after)
        return self._prompt.token_ids

    def sampling_params(self, request: ChatCompletionRequest, max_tokens: int) -> SamplingParams:
        """Return the run's parameters with a client's additions: earlier stops, and logprobs of more tokens."""
        assert self._prompt is not None
        sampling = self.rollout.sampling
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        asked = replace(
            sampling,
            seed=self.rollout.seed(self._prompt) if self._uses_seeds else None,
            max_new_tokens=min(max_tokens, self._max_tokens),
            stop_strings=(*sampling.stop_strings, *stop),
            stop_token_ids=(*sampling.stop_token_ids, *(request.stop_token_ids or ())),
        )
        params = sampling_params(asked, num_samples=1, position=0, records_logprobs=self._records_logprobs)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        params.detokenize = True
        params.skip_special_tokens = request.skip_special_tokens
        if request.logprobs:
            params.logprobs = request.top_logprobs or 0
        return params

    def keep(self, response: ChatCompletionResponse, weight_version: int) -> None:
        """Add the answered call to the rollout."""
        assert self.completion is not None and self._prompt is not None
        reply = response.choices[0].message.model_dump()
        self.rollout.add(self._messages, self._variables, self._prompt, self.completion, reply, weight_version)


class ChatRequest(ChatCompletionRequest):
    """A request that may belong to a rollout."""

    _call: Call | None = PrivateAttr(default=None)

    def to_sampling_params(self, max_tokens: int, default_sampling_params: dict[str, Any]) -> SamplingParams:
        """Return the rollout's parameters if the request belongs to one, else vLLM's."""
        if self._call is None:
            return super().to_sampling_params(max_tokens, default_sampling_params)
        return self._call.sampling_params(self, max_tokens)


class RecordedChat(OpenAIServingChat):
    """vLLM's server of chat completions.

    Args:
        turns: Turns messages after a response into tokens.
        adds_bos: Prompts begin with the BOS token.
        answers: Completions of the engine's requests.
        adapters: vLLM's request for the policy's adapters; None without.
        arguments: Arguments of `OpenAIServingChat`.
    """

    def __init__(
        self, *, turns: TurnEncoder, adds_bos: bool, answers: Answers, adapters: Any, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self._answers = answers
        self._turns = turns
        self._adds_bos = adds_bos
        self._adapters = adapters
        # Ignore the model folder's defaults.
        self.default_sampling_params = {}

    async def render_chat_request(self, request: Any) -> tuple[list[Any], list[Any]] | ErrorResponse:
        """Render messages and prompt; in a rollout the prompt begins with the previous call's tokens."""
        rendered = await super().render_chat_request(request)
        if isinstance(rendered, ErrorResponse) or request._call is None:
            return rendered
        messages, (prompt,) = rendered
        if prompt["type"] != "token":
            return create_error_response("rollouts are text: images, audio and embeddings cannot be trained on")
        token_ids: list[int] = cast(Any, prompt)["prompt_token_ids"]
        if self._adds_bos:
            token_ids = [*missing_bos(self._turns.tokenizer, token_ids), *token_ids]
        token_ids = list(request._call.prompt(messages, token_ids, self._turns))
        limit = self.model_config.max_model_len
        if len(token_ids) >= limit:
            return create_error_response(
                f"This model's maximum context length is {limit} tokens, and the messages have {len(token_ids)} "
                "already; end the conversation, or raise policy.max_total_sequence_length",
                status_code=HTTPStatus.BAD_REQUEST,
            )
        return messages, [{"type": "token", "prompt_token_ids": token_ids, "cache_salt": request.cache_salt}]

    def _maybe_get_adapters(self, request: Any, supports_default_mm_loras: bool = False) -> Any:
        """Return the policy's adapters for every request."""
        return self._adapters or super()._maybe_get_adapters(request, supports_default_mm_loras)

    @staticmethod
    def _base_request_id(raw_request: Any, default: str | None = None) -> str:
        """Return a name for the request, which no other one has, even if the client gives two the same."""
        return f"{OpenAIServingChat._base_request_id(raw_request, default)}-{uuid.uuid4().hex[:8]}"

    async def chat_completion_full_generator(
        self, request: Any, result_generator: AsyncIterator[RequestOutput], request_id: str, *args: Any, **kwargs: Any
    ) -> ErrorResponse | ChatCompletionResponse:
        """Return the response; for a rollout, keep the engine's output."""
        results = self._seen(request, result_generator, request_id)
        return await super().chat_completion_full_generator(request, results, request_id, *args, **kwargs)

    async def _seen(
        self, request: Any, results: AsyncIterator[RequestOutput], request_id: str
    ) -> AsyncIterator[RequestOutput]:
        last = None
        try:
            async for result in results:
                last = result
                yield result
        finally:
            if last is None or request._call is None:
                self._answers.drop(request_id, request.n or 1)
        if last is not None and request._call is not None:
            (request._call.completion,) = await self._answers.completions(last)


def request_problem(request: ChatCompletionRequest, sampling: SamplingSettings) -> str | None:
    """Return why a rollout cannot send this request (its tokens would be sampled unlike the run's), or None."""
    ours = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or 0}
    for name, value in ours.items():
        given = getattr(request, name)
        if name == "top_k" and given == -1:
            given = 0
        if given is not None and given != value:
            return (
                f"{name}={given}, but this rollout is sampled with {name}={value}, so that its logprobs are the "
                f"policy's; leave {name} out, or change policy.generation"
            )
    if request.response_format is not None and request.response_format.type != "text":
        return "response_format changes the distribution of tokens, which training would not know; leave it out"
    for name, neutral in _NEUTRAL.items():
        given = getattr(request, name)
        if not any(given == value for value in neutral):
            return f"{name}={given} cannot be asked for in a rollout that is trained on; leave it out"
    return None


def _tools(request: ChatCompletionRequest) -> list[dict[str, Any]] | None:
    return None if request.tools is None else [tool.model_dump() for tool in request.tools]
