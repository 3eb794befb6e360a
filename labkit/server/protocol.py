"""What a client may send: OpenAI's fields that are acted on, and vLLM's extras. All else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from labkit.config import MAX_LOGPROBS, MAX_N, SamplingParams
from labkit.engine.settings import Settings
from labkit.errors import RequestError
from labkit.server.errors import ApiError, bad_request, from_request_error

BIG = 2**31 - 1  # more tokens than any model takes; what is larger does not fit the engine's integers

Roles = Literal["system", "user", "assistant", "tool", "developer"]
Temperature = Annotated[float, Field(ge=0, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopString = Annotated[str, Field(max_length=4096)]  # of a longer one the end of every piece of text would be looked at
Tokens = Annotated[int, Field(ge=0, le=BIG)]


class Closed(BaseModel):
    """JSON types as they are: no "5" for 5, no true for 1; and no field that is not known.

    A client may send a million wrong values, and pydantic would describe each of them: here the first one ends it.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _one_stranger(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        strangers = [name for name in value if name not in cls.model_fields]
        if len(strangers) < 2:
            return value
        return {name: item for name, item in value.items() if name in cls.model_fields or name == strangers[0]}


class Strict(Closed):
    """A request."""

    # Fields of OpenAI's API that would change the answer in a way that this server cannot.
    unsupported: ClassVar[frozenset[str]] = frozenset()
    # Fields of it that are taken with these values, which change nothing, and refused with any other.
    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str | None = None


def _up_to_the_first_wrong(*kinds: type) -> Callable[[Any], Any]:
    """For an object whose values are of these types: of one with others, what pydantic needs to name the first."""

    def cut(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return next(({key: item} for key, item in value.items() if type(item) not in kinds), value)

    return cut


class TextPart(TypedDict):
    """For the description of the API: `Message` looks at its parts itself."""

    type: Literal["text"]
    text: str


class Message(Closed):
    """One message of a chat. Text parts are joined with a newline."""

    role: Roles
    content: str
    name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        # Servers send these with an answer, and clients send them back.
        value = {key: item for key, item in value.items() if item is not None}
        value = {key: item for key, item in value.items() if key not in ("tool_calls", "annotations") or item != []}
        for key in ("tool_calls", "function_call", "audio", "refusal"):
            if key in value:
                raise PydanticCustomError("unsupported", "{key} in a message is not supported here", {"key": key})
        return value

    @field_validator("content", mode="before", json_schema_input_type=str | list[TextPart])
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        texts = [part["text"] for part in value if _is_text_part(part)]
        if not value or len(texts) < len(value):
            raise PydanticCustomError("parts", 'content must be a string or a list of {"type": "text", "text": "…"}')
        return "\n".join(texts)

    def for_template(self) -> dict[str, str]:
        """As a chat template reads it."""
        return self.model_dump(exclude_none=True)


class StreamOptions(Closed):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's; guidellm asks for it


class GenerationRequest(Strict):
    """What chat and completions have in common."""

    unsupported = frozenset(
        ("modalities", "audio", "prediction", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    )
    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "store": (False,),
        "service_tier": ("auto", "default"),
    }

    max_tokens: Tokens | None = None
    min_tokens: Tokens = 0
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Share = 0.0
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    logit_bias: Annotated[dict[str, float], BeforeValidator(_up_to_the_first_wrong(int, float))] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_up_to_the_first_wrong(str))] | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options", "stream_options is for streams; set stream to true or leave it out")
        return self

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_usage_in_chunks(self) -> bool:
        """As in vLLM, a word about how usage is told: without include_usage there is none."""
        return self.stream_options is not None and self.wants_usage and self.stream_options.continuous_usage_stats

    def _sampling(self, **fields: Any) -> SamplingParams:
        """The engine's parameters: the fields that have the same name there, and `fields`."""
        same = set(SamplingParams.__dataclass_fields__) & set(type(self).model_fields) - set(fields)
        return SamplingParams(**{name: getattr(self, name) for name in same}, **fields)


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    unsupported = GenerationRequest.unsupported | frozenset(
        (
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "functions",
            "function_call",
            "reasoning_effort",
            "verbosity",
            "web_search_options",
        )
    )
    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationRequest.without_effect,
        "response_format": ({"type": "text"},),
    }

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, le=BIG)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=BIG)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise _wrong("top_logprobs", "top_logprobs needs logprobs: true")
        return self

    def name_of(self, param: str | None) -> str | None:
        """The name that a client knows one of the engine's fields by."""
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return {"prompt": "messages", "logprobs": "top_logprobs"}.get(param or "", param)

    def sampling(self) -> SamplingParams:
        return self._sampling(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. Each prompt is a text or token ids, and there may be several."""

    unsupported = GenerationRequest.unsupported | frozenset(("suffix", "best_of"))
    DEFAULT_MAX_TOKENS: ClassVar[int] = 16

    prompt: list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False

    @field_validator("prompt", mode="plain", json_schema_input_type=str | list[str] | list[int] | list[list[int]])
    @classmethod
    def _as_list(cls, value: Any) -> list[str] | list[list[int]]:
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            if all(isinstance(item, str) for item in value):
                return value
            if _are_ids(value):
                return [value]
            if all(isinstance(item, list) and item and _are_ids(item) for item in value):
                return value
        raise PydanticCustomError("prompt", "prompt must be a string, token ids, or a list of one of them, not empty")

    @model_validator(mode="after")
    def _check_max_tokens(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise _wrong("max_tokens", "max_tokens is 0, which is for echo only; it must be 1 or more")
        return self

    def name_of(self, param: str | None) -> str | None:
        return "logprobs" if param == "prompt_logprobs" else param

    def sampling(self) -> SamplingParams:
        scores_prompt = self.echo and (self.logprobs is not None or self.max_tokens == 0)
        return self._sampling(
            max_tokens=self.DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            prompt_logprobs=(self.logprobs or 0) if scores_prompt else None,
        )


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or the prompt that a chat would make."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise _wrong("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """POST /detokenize"""

    tokens: Annotated[list[int], Field(fail_fast=True)]


class SettingsRequest(Strict):
    """POST /dashboard/settings: what is left out stays as it is. How high the numbers may go, the engine knows."""

    policy: str | None = None
    enable_prefix_caching: bool | None = None
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=BIG)] | None = None
    max_num_seqs: Annotated[int, Field(ge=1, le=BIG)] | None = None

    def settings(self) -> Settings:
        return Settings(**self.model_dump(exclude={"model"}))


Request = TypeVar("Request", bound=Strict)


def parse(body: bytes, kind: type[Request]) -> Request:
    """Read a request. Raises ApiError (400) saying what is wrong, with the field in `param`."""
    fields = {name: value for name, value in _decode(body).items() if value is not None}
    for name in [name for name in fields if name in kind.unsupported or name in kind.without_effect]:
        value = fields.pop(name)
        harmless = [msgspec.json.encode(fine) for fine in kind.without_effect.get(name, ())]
        if msgspec.json.encode(value) not in harmless:
            raise bad_request(f"{name} is not supported here", name, "unsupported_parameter")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _explain(error) from None


def engine_params(request: ChatRequest | CompletionRequest) -> SamplingParams:
    """What the engine is asked for. Raises ApiError (400) in the client's words."""
    try:
        return request.sampling()
    except RequestError as error:
        raise from_request_error(error, request.name_of(error.param)) from None


def _decode(body: bytes) -> dict[str, Any]:
    """JSON as RFC 8259 has it: no NaN, no number beyond a double, no half of a surrogate pair."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    return value


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _are_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _wrong(param: str, message: str) -> PydanticCustomError:
    """An error that only a look at several fields shows."""
    return PydanticCustomError("fields", "{message}", {"message": message, "param": param})


def _explain(error: ValidationError) -> ApiError:
    """The first thing that pydantic found, as an answer."""
    first = error.errors(include_url=False)[0]
    param = first.get("ctx", {}).get("param") or _path(first["loc"])
    kind, message, given = first["type"], first["msg"], first["input"]
    if kind == "extra_forbidden":
        return bad_request(f"{param} is not a field of this request", param, "unknown_parameter")
    if kind == "unsupported":
        return bad_request(message, f"{param}.{first['ctx']['key']}", "unsupported_parameter")
    if kind == "missing":
        return bad_request(f"{param} is missing", param)
    if kind in ("fields", "prompt", "parts"):
        return bad_request(message, param)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        message = "It must be an object"  # pydantic names our classes
    message = message.partition(" after validation")[0]
    seen = f", not {given!a}" if isinstance(given, (bool, int, float, str)) and len(str(given)) < 50 else ""
    return bad_request(f"{param}: {message[0].lower()}{message[1:]}{seen}", param)


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].role`. Of a union pydantic also names the branch, which is no field: it is left out."""
    path = str(loc[0])
    for part in loc[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            path += f".{part}"
    return path
