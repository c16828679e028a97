"""Serves vLLM's chat completions over HTTP, for rollouts that agents drive.

The server runs on the engine's event loop. `/v1/chat/completions` answers every admitted client.
`/rollouts/ID/v1/chat/completions` answers for an open rollout, with the run's sampling, and keeps the tokens. Requests
that come or are open while the engine sleeps or has no valid weights get 503 with `Retry-After`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.engine.protocol import ErrorResponse
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.entrypoints.serve.utils.server_utils import exception_handler
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.utils.network_utils import get_ip
from vllm.v1.engine.exceptions import EngineGenerateError

from nemo_offload_rl.data.encoding import TurnEncoder
from nemo_offload_rl.data.tokenizer import load_tokenizer
from nemo_offload_rl.errors import ConfigError, UserError
from nemo_offload_rl.generation.served_rollouts import ServedCall, ServedRollout
from nemo_offload_rl.generation.vllm.chat_serving import Call, ChatRequest, RecordedChat, request_problem
from nemo_offload_rl.generation.vllm.http_limits import BadRequest, HttpLimits, LimitedProtocol, json_body
from nemo_offload_rl.generation.vllm.requests import Answers, ServedWeights, cache_salt
from nemo_offload_rl.keys.engine import VllmSettings
from nemo_offload_rl.keys.generation import SamplingSettings

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

RETRY_AFTER_S = 5
WEIGHT_VERSION_HEADER = "X-Weight-Version"
_KEEP_ALIVE_S = 120
_LIMITS = HttpLimits()
# Errors that vLLM and chat templates raise for requests that they cannot take.
_REFUSALS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, TemplateError)
_KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    503: "ServiceUnavailableError",
}


async def _asked(raw_request: Request) -> ChatRequest:
    """Parse the body into a request; first check that it is an object, which vLLM's own checks assume."""
    kind = raw_request.headers.get("Content-Type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":  # a web page may make a browser send others
        raise BadRequest(f"Content-Type is {kind or 'missing'}; send JSON, with Content-Type: application/json")
    body = await json_body(raw_request, _LIMITS)
    for name, value in body.items():
        if name != "seed" and any(map(_is_wide, value if isinstance(value, list) else [value])):
            raise BadRequest(f"{name} has a number of more than 32 bits; give a smaller one")
    try:
        request = ChatRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise BadRequest(f"{where}: {first['msg']}" if where else first["msg"]) from error
    except _REFUSALS as error:
        raise BadRequest(f"the body is not a request for a chat completion: {error}") from error
    if (request.n or 1) > _LIMITS.choices:
        raise BadRequest(f"n is {request.n}, but a request gets at most {_LIMITS.choices} answers; lower n")
    return request


def _is_wide(value: Any) -> bool:
    """Tell whether this is an integer that the engine's tensors cannot hold; it would end the engine."""
    return isinstance(value, int) and not -(2**31) <= value < 2**31


Asked = Annotated[ChatRequest, Depends(_asked)]


class HttpServer:
    """Server that listens from `start` on and refuses requests with 503 until `open_gate`.

    Args:
        llm: The engine.
        settings: The engine's settings, with an `endpoint`.
        served: Version of the engine's weights.
        answers: Completions of the engine's requests.
        adapters: vLLM's request for the policy's adapters, if the engine applies them.

    Raises:
        ConfigError: The address cannot be used.
        DataError: There is no tokenizer, or it has no chat template.
    """

    def __init__(
        self, llm: AsyncLLM, settings: VllmSettings, served: ServedWeights, answers: Answers, adapters: Any = None
    ) -> None:
        endpoint = settings.endpoint
        assert endpoint is not None
        self._listening = endpoint.listening
        self._uses_seeds = settings.per_request_seeds
        self._served = served
        self._answers = answers
        self._vocab_size = llm.model_config.get_vocab_size()
        self._is_open = False
        self._num_closings = 0
        self._works: set[asyncio.Task[Any]] = set()
        self._rollouts: dict[str, ServedRollout] = {}
        kwargs = endpoint.tokenizer.chat_template_kwargs
        tokenizer = load_tokenizer(endpoint.tokenizer)
        self._models = OpenAIServingModels(llm, [BaseModelPath(settings.model_name, settings.model_name)])
        both: dict[str, Any] = {
            **endpoint.serving_chat_kwargs,
            "request_logger": None,
            "chat_template": tokenizer.chat_template,
            "chat_template_content_format": "auto",
            "default_chat_template_kwargs": kwargs,
        }
        try:
            self._chat = RecordedChat(
                turns=TurnEncoder(tokenizer, kwargs),
                adds_bos=endpoint.add_bos,
                answers=answers,
                adapters=adapters,
                engine_client=llm,
                models=self._models,
                response_role="assistant",
                online_renderer=OnlineRenderer(llm.model_config, llm.renderer, **both),
                **both,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "vLLM refuses policy.generation.vllm_cfg.http_server_serving_chat_kwargs="
                f"{dict(endpoint.serving_chat_kwargs)}: {error}"
            ) from error
        self._socket = self._listening.bound()
        config = uvicorn.Config(
            self._app(),
            http=LimitedProtocol.within(_LIMITS),
            ws="none",
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._server = uvicorn.Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """URL of the server, without a path."""
        host, port = self._socket.getsockname()[:2]
        host = get_ip() if host in ("0.0.0.0", "::") else host
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Start to listen. This and all following methods run on the engine's event loop."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Stop the server; open requests get 503."""
        await self.close_gate()
        self._server.should_exit = self._server.force_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()

    async def open_gate(self) -> None:
        """Answer requests from now on."""
        self._is_open = True

    async def close_gate(self) -> None:
        """Refuse requests from now on; abort the open ones, which have left the engine on return."""
        self._is_open = False
        self._num_closings += 1
        for work in self._works:
            work.cancel()
        await asyncio.gather(*self._works, return_exceptions=True)

    async def open_rollouts(self, rollouts: Mapping[str, SamplingSettings]) -> None:
        """Answer calls of these rollouts from now on."""
        self._rollouts |= {name: ServedRollout(sampling) for name, sampling in rollouts.items()}

    async def take_rollouts(self, names: Collection[str]) -> dict[str, list[ServedCall]]:
        """Close these rollouts and return their calls.

        Raises:
            RuntimeError: They are not open here: an earlier engine had them, which has been restarted since.
        """
        if unknown := set(names) - self._rollouts.keys():
            raise RuntimeError(f"{len(unknown)} rollouts are not open: they were closed, or their engine was restarted")
        return {name: self._rollouts.pop(name).calls for name in names}

    # -- HTTP ------------------------------------------------------------------------------------------------------

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.state.args = SimpleNamespace(log_error_stack=False)  # vLLM's error handlers read it
        app.exception_handler(Exception)(exception_handler)

        @app.exception_handler(BadRequest)
        async def refuse(request: Request, error: BadRequest) -> Response:
            return self._error(error.status, str(error))

        @app.middleware("http")
        async def admit(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
            if not self._listening.admits(request.headers.get("Authorization")):
                return self._error(401, "the token is missing or wrong: send `Authorization: Bearer TOKEN`")
            response = await call_next(request)
            response.headers.setdefault(WEIGHT_VERSION_HEADER, str(self._served.version))
            return response

        @app.get("/health")
        async def health() -> Response:
            if not self._is_open:
                return self._asleep()
            return JSONResponse({"status": "ready", "weight_version": self._served.version})

        @app.get("/v1/models")
        @app.get("/rollouts/{rollout_id}/v1/models")
        async def models() -> Response:
            return JSONResponse((await self._models.show_available_models()).model_dump())

        @app.post("/v1/chat/completions")
        @with_cancellation
        async def plain(request: Asked, raw_request: Request) -> Response:
            return await self._answer(request, raw_request, None)

        @app.post("/rollouts/{rollout_id}/v1/chat/completions")
        @with_cancellation
        async def of_rollout(request: Asked, raw_request: Request, rollout_id: str) -> Response:
            rollout = self._rollouts.get(rollout_id)
            if rollout is None:
                return self._error(404, f"rollout {rollout_id} is not open: it has ended, or never began")
            return await self._answer(request, raw_request, rollout)

        return app

    async def _answer(self, request: ChatRequest, raw_request: Request, rollout: ServedRollout | None) -> Response:
        if not self._is_open:
            return self._asleep()
        streams, counts = request.stream, request.stream_options and request.stream_options.include_usage
        request.stream, request.stream_options = False, None  # the whole answer is one event
        # Ids outside the vocabulary end the engine if `min_tokens` is set.
        if not all(0 <= token_id < self._vocab_size for token_id in request.stop_token_ids or ()):
            return self._error(400, f"stop_token_ids may be 0 to {self._vocab_size - 1}; leave out others")
        if rollout is not None:
            if (problem := request_problem(request, rollout.sampling)) is not None:
                return self._error(400, problem)
            request._call = Call(
                rollout, request, uses_seeds=self._uses_seeds, records_logprobs=self._answers.records_logprobs
            )
        num_closings = self._num_closings
        version, asked_salt = self._served.version, request.cache_salt

        async def answered() -> Any:
            nonlocal version
            version = await self._served.next_version()
            request.cache_salt = cache_salt(version, asked_salt)
            return await self._chat.create_chat_completion(request, raw_request)

        work = asyncio.create_task(answered())
        self._works.add(work)
        try:
            answer = await work
        except asyncio.CancelledError:
            if num_closings == self._num_closings:  # the client has disconnected
                raise
            return self._asleep()
        except UserError as error:
            return self._error(400, str(error))
        except _REFUSALS as error:
            return self._error(400, str(error))
        except EngineGenerateError as error:
            if not isinstance(error.__cause__, _REFUSALS):
                raise
            return self._error(400, f"the engine refuses the request: {error.__cause__}")
        finally:
            work.cancel()
            self._works.discard(work)
        if num_closings != self._num_closings:  # the gate was closed, and vLLM answered with the abort
            return self._asleep()
        headers = {WEIGHT_VERSION_HEADER: str(version)}
        if isinstance(answer, ErrorResponse):
            return JSONResponse(answer.model_dump(), status_code=answer.error.code, headers=headers)
        assert isinstance(answer, ChatCompletionResponse)
        if request._call is not None:
            request._call.keep(answer, version)
        content = answer.model_dump() | {"weight_version": version}
        if streams:
            return StreamingResponse(_events(content, bool(counts)), media_type="text/event-stream", headers=headers)
        return JSONResponse(content, headers=headers)

    def _asleep(self) -> Response:
        response = self._error(503, f"the engine sleeps or gets new weights; ask again in {RETRY_AFTER_S} s")
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
        return response

    def _error(self, status: int, message: str) -> Response:
        body = {"error": {"message": message, "type": _KINDS[status], "param": None, "code": status}}
        return JSONResponse(body, status_code=status, headers={WEIGHT_VERSION_HEADER: str(self._served.version)})


async def _events(content: dict[str, Any], counts: bool) -> AsyncIterator[str]:
    """Stream a response as one chunk, followed by its usage if `counts`."""
    chunk = {**content, "object": "chat.completion.chunk", "usage": None, "choices": []}
    choices = []
    for choice in content["choices"]:
        message = choice["message"]
        calls = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls") or ())]
        delta = {**message, "tool_calls": calls} if calls else message
        choices.append({**{name: value for name, value in choice.items() if name != "message"}, "delta": delta})
    yield f"data: {json.dumps({**chunk, 'choices': choices})}\n\n"
    if counts:
        yield f"data: {json.dumps({**chunk, 'usage': content['usage']})}\n\n"
    yield "data: [DONE]\n\n"
