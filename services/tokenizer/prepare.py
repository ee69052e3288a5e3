"""From the bytes of a public request to a Tokenized: parse, validate, render, encode. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.tokenizer.chat import ChatTemplate
from services.tokenizer.request import GenerateRequest, read_request
from shared.errors import BadRequest
from shared.messages import Sampling, Tokenized, floats, ints
from shared.vocabulary import Vocabulary

DEFAULT_COMPLETION_TOKENS = 16  # as in the OpenAI API


@dataclass(frozen=True, slots=True)
class Submission:
    """A public request as it arrived, with what the shell drew for it."""

    tenant: str
    inbox: str
    body: bytes  # JSON or msgpack
    fresh_id: str  # used when the request names none
    fresh_seed: int  # likewise; uint64
    received_wall_us: int
    trace: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a tokenizer needs to know about its model."""

    name: str
    vocabulary: Vocabulary
    template: ChatTemplate
    max_context: int  # prompt and answer together, tokens
    default_timeout_us: int


def request_id_of(fields: dict[str, Any], fresh_id: str) -> str:
    """The id to answer under, also when the rest of the request is wrong."""
    asked = fields.get("request_id")
    return asked if isinstance(asked, str) and asked else fresh_id


def prepare(submission: Submission, fields: dict[str, Any], model: ServedModel) -> Tokenized:
    """The request for the scheduler, from the `fields` of its body. Raises BadRequest."""
    request = read_request(fields)
    if request.model not in (None, model.name):
        raise BadRequest(
            f"the body asks for model {request.model!r}, its subject for {model.name!r}", param="model"
        )
    prompt = encode_prompt(request, model, submission.received_wall_us)
    seed = submission.fresh_seed if request.seed is None else request.seed % 2**64
    timeout_us = model.default_timeout_us if request.timeout_s is None else int(request.timeout_s * 1e6)
    return Tokenized(
        request=request.request_id or submission.fresh_id,
        attempt=1,
        tenant=submission.tenant,
        model=model.name,
        inbox=submission.inbox,
        slo_class=request.slo_class,
        timeout_us=timeout_us,
        received_wall_us=submission.received_wall_us,
        n=request.n,
        max_tokens=_max_tokens(request, len(prompt), model.max_context),
        stream=request.stream,
        format="chat" if request.messages is not None else "completion",
        finish_detached=request.finish_detached,
        seed=seed,
        sampling=_sampling(request, model.vocabulary.size),
        stop=tuple(request.stop),
        stop_ids=ints(_stop_ids(request, model.vocabulary)),
        logprobs=request.logprobs,
        tokens=ints(prompt),
        include_stop=request.include_stop_str_in_output,
        include_usage=request.stream_options.include_usage,
    )


def encode_prompt(request: GenerateRequest, model: ServedModel, wall_us: int) -> list[int]:
    """The prompt's token ids. A text prompt gets the model's begin token; ids are taken as they are.
    Raises BadRequest."""
    vocabulary = model.vocabulary
    if request.messages is not None:
        messages = [message.model_dump() for message in request.messages]
        ids = model.template.encode(messages, request.add_generation_prompt, wall_us)
    elif isinstance(request.prompt, str):
        ids = [*vocabulary.prefix_ids, *vocabulary.encode(request.prompt, special=True)]
    else:
        ids = request.prompt or []
        _check_ids("prompt", ids, vocabulary.size)
    if not ids:
        raise BadRequest("the prompt is empty", param="prompt")
    return ids


def _max_tokens(request: GenerateRequest, prompt_tokens: int, max_context: int) -> int:
    room = max_context - prompt_tokens
    if room < 1:
        raise BadRequest(
            f"context_length_exceeded: the prompt has {prompt_tokens} tokens, the context of this model "
            f"{max_context}, and the answer needs at least one; shorten the prompt",
            param="messages" if request.messages is not None else "prompt",
        )
    asked = request.max_completion_tokens or request.max_tokens
    if asked is None:
        asked = room if request.messages is not None else DEFAULT_COMPLETION_TOKENS
    return min(asked, room)


def _sampling(request: GenerateRequest, vocabulary_size: int) -> Sampling:
    bias = sorted(request.logit_bias.items())
    _check_ids("logit_bias", [token for token, _ in bias], vocabulary_size)
    return Sampling(
        temperature=request.temperature,
        top_k=max(request.top_k, 0),
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        bias_ids=ints(token for token, _ in bias),
        bias_values=floats(value for _, value in bias),
    )


def _stop_ids(request: GenerateRequest, vocabulary: Vocabulary) -> list[int]:
    _check_ids("stop_token_ids", request.stop_token_ids, vocabulary.size)
    ends = () if request.ignore_eos else vocabulary.eos_ids
    return sorted({*ends, *request.stop_token_ids})


def _check_ids(param: str, ids: list[int], size: int) -> None:
    for token in ids:
        if not 0 <= token < size:
            raise BadRequest(f"`{param}`: {token} is not a token id (0 to {size - 1})", param=param)
