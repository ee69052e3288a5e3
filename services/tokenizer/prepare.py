"""`prepared` turns the bytes of a public request into a Tokenized: parse, validate, render, encode. Pure.

The actor calls it on the event loop for short requests, BackgroundEncoder on a thread for long ones. Each 400
names its field: a wrong type or range, an unknown field (misspelt fields are never ignored), or a value that
is not supported. shared/api.py defines the fields.

`sampling_defaults` reads what the authors of a model state for requests that leave a field out.

A folder states it in generation_config.json, under the keys that vLLM reads, too; a GGUF file in keys of
llama.cpp's converter; the catalogue for a file that states nothing. A key with null counts as absent, other
keys are not read. A value that no request may have is an error at the start, never another value.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pkgutil import resolve_name
from typing import Any, Protocol

import msgpack
from pydantic import ValidationError

from services.tokenizer.chat_template import ChatTemplate, TemplateOptions
from shared import api, errors, session_hints
from shared.aliases import AdapterFiles
from shared.answer_formats.formats import HERMES, THINKING, Format
from shared.codec import MAX_PROCESSOR_CHARS
from shared.messages import (
    EMBEDDING,
    EMBEDDING_BASE64,
    MANY_CALLS,
    WHOLE_VECTOR,
    Ints,
    Sampling,
    Tokenized,
    floats,
    ints,
)
from shared.nats import subjects
from shared.nats.access import CLASSES, is_keepers
from shared.savepoints import body_hash
from shared.vocab.vocabulary import Vocabulary

NOTHING = "temperature 1, as nothing is stated"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """`fields`: values of a request's fields, by name. `max_tokens` of a chat; 0: what the context has room
    for."""

    fields: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int = 0

    def __str__(self) -> str:
        longest = {"max_tokens": self.max_tokens} if self.max_tokens else {}
        return ", ".join(f"{name} {value:g}" for name, value in {**self.fields, **longest}.items()) or NOTHING


log = logging.getLogger("headrace.tokenizer")

DEFAULT_COMPLETION_TOKENS = 16  # as in the OpenAI API
MAX_CANCELS = 10_000  # then the oldest is dropped: clients may cancel requests that do not exist
ROUTING_TOKENS = 256  # of a completion: with more, texts with the same start find each other less often
_CUT_CHARS = 4  # of the longest tokens: so much of a text is read for one that counts, if it is cut
TAIL_TOKENS = 64  # of a prompt: more than the marker of reasoning and the white space after it take
MOST_PREDICTED = 8_192  # tokens: drafts change the time of an answer alone, so what is over is left out
MOST_PROMPT_SCORES = 100_000  # log probabilities: 7 MB of JSON, below the payload of a message
MOST_TOKEN_CHARS = 16  # of a prediction's tokens on average, so that a long text is not encoded for nothing
CANCELLED = "the request was cancelled"
LATE = "the request's time limit passed in intake"

Request = api.ChatRequest | api.CompletionRequest
_KINDS: dict[str, type[Request | api.EmbeddingRequest]] = {
    "messages": api.ChatRequest,
    "prompt": api.CompletionRequest,
    "input": api.EmbeddingRequest,
}
_KNOWN = {name for kind in _KINDS.values() for name in kind.model_fields}
_HINTS = {  # names of other servers and clients
    **dict.fromkeys(
        ("max_new_tokens", "max_output_tokens", "max_length", "max_gen_len", "num_predict"), "max_tokens"
    ),
    **dict.fromkeys(("top_n", "top_n_tokens"), "top_logprobs"),
    **dict.fromkeys(("stop_sequences", "stop_strings"), "stop"),
    **dict.fromkeys(("system", "instructions"), "messages"),
    **dict.fromkeys(("json_schema", "response_schema", "format", "text"), "response_format"),
    "inputs": "prompt",
    "num_beams": "n",
    "num_return_sequences": "n",
    "reasoning": "reasoning_effort",
    "do_sample": "temperature",
    "min_new_tokens": "min_tokens",
    "thinking": "chat_template_kwargs",
    "enable_thinking": "chat_template_kwargs",
}
_JUDGED = frozenset({"prompt", "input", "logits_processors"})  # checked where they are read


OUTPUT_FIELDS = frozenset(
    {"response_format", "structured_outputs", "grammar", "tools", "tool_choice", "parallel_tool_calls"}
    | {f"guided_{rule}" for rule in ("json", "regex", "choice", "grammar")}
)  # of requests whose answers have a form
FORMS = (
    "services.tokenizer.structured_output:output_of",
)  # fmt: skip


class AnswerForm(Protocol):
    """What a request asks of its answer: tools, a form of its text, or both."""

    @property
    def given(self) -> list[api.Tool] | None:
        """The tools that the model is shown; None without tools."""

    @property
    def is_all_calls(self) -> bool:
        """Whether the answer is nothing but calls."""

    @property
    def has_text_grammar(self) -> bool:
        """Whether the text of the answer follows a grammar, apart from calls."""

    def grammar(self, form: Format | None, *, thinking: bool, available: bool) -> str:
        """The grammar in a message, empty if nothing is followed. `thinking`: the prompt opens the reasoning.
        `available`: an executor can follow a grammar. Raises BadRequest."""


def answer_form_of(request: Request) -> AnswerForm | None:
    """None for a request whose answer is free text. Raises BadRequest."""
    if not (asked := request.model_fields_set & OUTPUT_FIELDS):
        return None
    for name in FORMS:
        found: AnswerForm = resolve_name(name)(request)
        return found
    raise errors.BadRequest(f"`{min(asked)}`: answers have no form here: leave it out", param=min(asked))


@dataclass(frozen=True, slots=True)
class Submission:
    """A public request as it arrived, with the id and seed drawn by the shell."""

    tenant: str
    inbox: str
    body: bytes  # JSON or msgpack
    fresh_id: str  # for a request without a `request_id`
    fresh_seed: int  # for a request without a `seed`; uint64
    received_wall_us: int
    trace: str = ""
    handled_wall_us: int = 0  # see Tokenized
    parent_span: str = ""  # see Tokenized
    received_us: int = 0  # the same two stamps by the monotonic clock, for decisions; 0: unknown
    handled_us: int = 0
    key: int = 0  # see standby.key_of
    attempt: int = 1
    classes: tuple[str, ...] = CLASSES  # service classes that the tenant may use
    grammars: bool = True  # an executor of this model can follow one
    alias: str = ""  # as in a subject: the request was sent to it
    adapted: bool = False  # and it is an adapter of this model
    run: int = 0  # see Tokenized

    @property
    def origin(self) -> Origin:
        return Origin(self.tenant, self.received_wall_us, self.handled_wall_us, self.parent_span)

    def prepared(self, request: str, outcome: Tokenized | errors.HeadraceError) -> Prepared:
        """The result of its preparation; `request` is the id to answer under."""
        return Prepared(self.inbox, request, outcome, self.trace, self.origin, self.received_us, self.key)


@dataclass(frozen=True, slots=True)
class Origin:
    """Tenant and times of a request, for its spans if it is refused."""

    tenant: str = ""
    received_wall_us: int = 0
    handled_wall_us: int = 0
    parent_span: str = ""
    tokenized: bool = False  # it was refused after its tokenization


NOWHERE = Origin()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready for a scheduler, or its error."""

    inbox: str
    request: str  # the id to answer under
    outcome: Tokenized | errors.HeadraceError
    trace: str = ""
    origin: Origin = NOWHERE
    received_us: int = 0  # as in Submission
    key: int = 0  # likewise


class Cancels:
    """The last cancellation of each request, for requests that still wait in a queue of this tokenizer."""

    def __init__(self) -> None:
        self._at_us: dict[tuple[str, str], int] = {}  # tenant, request; the oldest first

    def add(self, tenant: str, request: str, now_us: int) -> None:
        """Record that a request is cancelled at `now_us`."""
        self._at_us.pop((tenant, request), None)
        self._at_us[tenant, request] = now_us
        if len(self._at_us) > MAX_CANCELS:
            del self._at_us[next(iter(self._at_us))]

    def has_cancelled(self, tenant: str, request: str, received_us: int) -> bool:
        """True if a request received at `received_us` was cancelled afterwards."""
        return bool(received_us) and self._at_us.get((tenant, request), 0) > received_us

    def __len__(self) -> int:
        return len(self._at_us)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a tokenizer."""

    name: str
    vocabulary: Vocabulary
    template: ChatTemplate
    max_context: int  # prompt and answer together, tokens
    default_timeout_us: int
    processors: tuple[str, ...] = ()  # logits processors that a request may name
    trusts_templates: bool = False  # a request may bring its own chat template
    answer_format: Format | None = HERMES  # of chats; None: the text is the answer
    aliases: tuple[str, ...] = ()  # further names
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    # the files of an adapter of this model by its name, for a tenant; it raises UnknownModel
    adapter_of: Callable[[str, str], AdapterFiles | None] = lambda name, tenant: None

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a request may use."""
        return self.name, *self.aliases


def read_body(body: bytes) -> dict[str, Any]:
    """The fields of a request: JSON if it starts with `{`, else a msgpack map. Null means absent.

    Raises BadRequest."""
    try:
        if body.lstrip()[:1] == b"{":
            fields = api.read_json(body)
        else:
            fields = msgpack.unpackb(body, strict_map_key=False, object_pairs_hook=_map)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise errors.BadRequest(
            f"the body is neither a JSON object nor a msgpack map: {error!s:.200}; send for example "
            '{"messages":[{"role":"user","content":"Hi"}]}'
        ) from error
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise errors.BadRequest("the body must be a JSON object or a msgpack map with field names")
    if body.lstrip()[:1] != b"{":
        api.refuse_odd_values({name: value for name, value in fields.items() if name not in _JUDGED})
    return {name: value for name, value in fields.items() if value is not None}


def _map(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A msgpack map with text or integer keys. Raises ValueError for other keys."""
    fields = {}
    for key, value in pairs:
        if type(key) not in (str, int):
            raise ValueError(f"a key of a map is {key!r:.40}, a text is expected")
        fields[key] = value
    return fields


def read_request(fields: dict[str, Any]) -> Request | api.EmbeddingRequest:
    """The validated request: a chat if it has `messages`, a completion if it has `prompt`, else one for a
    vector. Raises BadRequest with the name of the field."""
    if not fields.keys() <= _KNOWN:
        raise _unknown(next(name for name in fields if name not in _KNOWN))
    if len(given := _KINDS.keys() & fields.keys()) != 1:
        raise errors.BadRequest("give either `messages` or `prompt`, or `input` for a vector")
    try:
        return _KINDS[given.pop()].model_validate(fields)
    except ValidationError as error:
        raise api.bad_field(error) from error


def _unknown(name: str) -> errors.BadRequest:
    hint = f"; did you mean `{_HINTS[name]}`?" if name in _HINTS else ""
    hint = hint or errors.did_you_mean(name, _KNOWN - {*api.IGNORED, *api.UNSUPPORTED}) or "; leave it out"
    return errors.BadRequest(f"`{name:.40}` is not a field of a request{hint}", param=name[:40])


def request_id_of(fields: dict[str, Any], fresh_id: str) -> str:
    """The id to answer under, also if the rest of the request is wrong. An invalid id is not repeated: it may
    be of any size."""
    asked = fields.get("request_id")
    return asked if isinstance(asked, str) and re.fullmatch(api.REQUEST_ID, asked) else fresh_id


def prepared(submission: Submission, model: ServedModel, cancels: Cancels | None = None) -> Prepared:
    """Prepare a request, or turn its error into the outcome. Never raises. Safe on a second thread: the only
    shared state is `cancels`."""
    request = submission.fresh_id
    try:
        fields = read_body(submission.body)
        request = request_id_of(fields, request)
        if cancels is not None and cancels.has_cancelled(submission.tenant, request, submission.received_us):
            raise errors.Cancelled(CANCELLED)
        outcome: Tokenized | errors.HeadraceError = prepare(submission, fields, model)
    except errors.HeadraceError as error:
        # The traceback would hold this frame, and with it the whole body, until the next collection.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        outcome = error
    except RecursionError:
        outcome = errors.BadRequest("the request is nested too deeply; send flat messages", param="messages")
    except Exception as error:  # a bug is a 500 for this client, never silence
        log.exception("request %s failed", request)
        outcome = errors.EngineError(f"the tokenizer failed on this request: {type(error).__name__}")
    return submission.prepared(request, outcome)


def prepare(submission: Submission, fields: dict[str, Any], model: ServedModel) -> Tokenized:
    """The request for the scheduler, from the `fields` of its body. Raises BadRequest, Forbidden, and
    DeadlineExceeded for a request that has waited longer than its time limit."""
    request = read_request(fields if "input" in fields else {**model.defaults.fields, **fields})
    asked, alias = request.model, submission.alias
    adapter = _adapter(submission, request, model).get("adapter_name")
    is_alias = bool(alias and asked and subjects.token(asked) == alias)
    if asked not in ((None, adapter) if adapter else (None, *model.names)) and not is_alias:
        raise errors.BadRequest(
            f"the body asks for model {asked!r:.80}, its subject for {model.name!r}: send that one, or none",
            param="model",
        )
    timeout_us = model.default_timeout_us if request.timeout_s is None else int(request.timeout_s * 1e6)
    if 0 < submission.received_us <= submission.handled_us - timeout_us:
        raise errors.DeadlineExceeded(LATE)
    if isinstance(request, api.EmbeddingRequest):
        return _for_vector(submission, request, model, timeout_us)
    output = answer_form_of(request)
    prompt = encode_prompt(request, output, model, submission.received_wall_us)
    form, thinking = _answer_format(request, output, model, prompt)
    grammar = "" if output is None else output.grammar(form, thinking=thinking, available=submission.grammars)
    seed = submission.fresh_seed if request.seed is None else request.seed % 2**64
    max_tokens = _max_tokens(request, len(prompt), model.max_context, model.defaults.max_tokens)
    if request.min_tokens > max_tokens:
        raise errors.BadRequest(
            f"`min_tokens`: an answer has at most {max_tokens} tokens", param="min_tokens"
        )
    most_calls = 1 if request.parallel_tool_calls is False else MANY_CALLS
    if output is None or output.given is None:
        most_calls = 0
    _check_prompt_scores(request, len(prompt))
    return Tokenized(
        **_common(submission, request, model, timeout_us, prompt),
        **_session(submission.tenant, request, max_tokens, output),
        n=request.n,
        max_tokens=max_tokens,
        stream=request.stream,
        format="chat" if isinstance(request, api.ChatRequest) else "completion",
        finish_detached=request.finish_detached,
        seed=seed,
        sampling=_sampling(request, model.vocabulary.size),
        stop=tuple(request.stop),
        stop_ids=ints(_stop_ids(request, model.vocabulary)),
        logprobs=_logprobs(request),
        prompt_logprobs=request.prompt_logprobs is not False,
        prompt_alternatives=int(request.prompt_logprobs),
        include_stop=request.include_stop_str_in_output,
        include_usage=request.stream_options.include_usage,
        processors=_processors(request, model),
        grammar=grammar,
        open_end=request.limit[1] is None,
        min_tokens=request.min_tokens,
        answer_format="" if form is None else f"{form.name}{THINKING if thinking else ''}",
        savepoints=_savepoints(request, submission),
        most_calls=most_calls,
        speculate=request.speculate,
        prediction=_prediction(request, model.vocabulary),
    )


def _check_prompt_scores(request: Request, tokens: int) -> None:
    """Raises BadRequest for more log probabilities of a prompt than a message holds."""
    if request.prompt_logprobs is False:
        return
    numbers = tokens * (1 + int(request.prompt_logprobs))
    if numbers > MOST_PROMPT_SCORES:
        raise errors.BadRequest(
            f"`prompt_logprobs`: {numbers} log probabilities of {tokens} tokens are over the limit of "
            f"{MOST_PROMPT_SCORES}: ask for fewer alternatives, or send a shorter prompt",
            param="prompt_logprobs",
        )


def _adapter(
    submission: Submission, request: Request | api.EmbeddingRequest, model: ServedModel
) -> dict[str, str]:
    """The fields of the adapter to which a request was sent, or whose name its body has; none without one.
    Raises UnknownModel for one that was removed, and Unavailable for one that this tokenizer lacks."""
    name = subjects.untoken(submission.alias) if submission.adapted and submission.alias else request.model
    is_model = name in model.names and not submission.adapted  # it may have the name of a removed adapter
    files = None if name is None or is_model else model.adapter_of(name, submission.tenant)
    if files is None:
        if submission.adapted:
            raise errors.Unavailable(
                f"the adapter {name!r:.80} is being added: try again", retry_after_ms=1_000
            )
        return {}
    return {"adapter": files.digest, "adapter_name": name or "", "adapter_path": files.path}


def _prediction(request: Request, vocabulary: Vocabulary) -> Ints:
    """The tokens that the answer is likely to repeat, at most MOST_PREDICTED of them."""
    if request.prediction is None:
        return ints()
    text = api.joined(request.prediction["content"])
    return ints(vocabulary.encode(text[: MOST_PREDICTED * MOST_TOKEN_CHARS])[:MOST_PREDICTED])


def _common(
    submission: Submission,
    request: Request | api.EmbeddingRequest,
    model: ServedModel,
    timeout_us: int,
    prompt: list[int],
) -> dict[str, Any]:
    """The fields that requests of all kinds have: the prompt, whose it is, where its answer goes."""
    return {
        "request": request.request_id or submission.fresh_id,
        "attempt": submission.attempt,
        "tenant": submission.tenant,
        "model": model.name,
        "inbox": submission.inbox,
        "slo_class": _slo_class(request, submission),
        "timeout_us": timeout_us,
        "received_wall_us": submission.received_wall_us,
        "tokens": ints(prompt),
        "handled_wall_us": submission.handled_wall_us,
        "parent_span": submission.parent_span,
        "routing_key": _routing_key(submission.tenant, request, prompt),
        "run": submission.run,
        **_adapter(submission, request, model),
    }


def _session(tenant: str, request: Request, max_tokens: int, output: AnswerForm | None) -> dict[str, Any]:
    """The hints of the client about the session. Raises BadRequest."""
    hints = session_hints.hints_of(request, request.prompt_cache_retention)
    return {
        "session": session_hints.name_of(tenant, hints.session),
        "parent": session_hints.name_of(tenant, hints.parent),
        "session_final": hints.final,
        "expects_tokens": min(hints.expects_tokens, max_tokens),
        "keep_us": hints.keep_us,
        "has_tools": output is not None and output.given is not None,
        "prefetch": hints.prefetch,
    }


def _for_vector(
    submission: Submission, request: api.EmbeddingRequest, model: ServedModel, timeout_us: int
) -> Tokenized:
    """A prompt whose vector is wanted: to the scheduler a greedy request for one token."""
    prompt = encode_input(request, model)
    if len(prompt) > model.max_context:  # if equal, only an encoder has room: the scheduler refuses others
        raise _over_context(
            model.max_context, f"the input has {len(prompt)} tokens; shorten the input", "input"
        )
    return Tokenized(
        **_common(submission, request, model, timeout_us, prompt),
        max_tokens=1,
        format=EMBEDDING if request.encoding_format == "float" else EMBEDDING_BASE64,
        sampling=Sampling(temperature=0.0),
        pooling=request.dimensions or WHOLE_VECTOR,
    )


def _routing_key(tenant: str, request: Request | api.EmbeddingRequest, prompt: list[int]) -> str:
    """The hash of a tenant and the first session of its program, else its `prompt_cache_key`, else the start
    of the prompt. That of a chat ends with the first message of the user: it is the same in every turn, and
    chats with one long system prompt do not all go to one scheduler."""
    if not isinstance(request, api.EmbeddingRequest) and (root := session_hints.hints_of(request).root):
        start = f"session {root}".encode()
    elif request.prompt_cache_key:
        start = f"key {request.prompt_cache_key}".encode()
    elif isinstance(request, api.ChatRequest):
        roles = [message.role for message in request.messages]
        first = request.messages[: roles.index("user") + 1 if "user" in roles else 1]
        start = json.dumps([(message.role, message.text) for message in first]).encode()
    else:
        start = ints(prompt[:ROUTING_TOKENS]).tobytes()
    return hashlib.blake2b(tenant.encode() + b"\0" + start, digest_size=8).hexdigest()


def _savepoints(request: Request, submission: Submission) -> str:
    """The hash that a savepoint of the request has, empty if the request has no savepoints. Raises
    BadRequest for a request that no keeper would send again."""
    if request.durable is None:
        return ""
    if not is_keepers(submission.inbox):
        raise errors.BadRequest(
            "`durable`: only the tokens of a submitted request are kept (docs/durability.md); submit it, or "
            "leave it out",
            param="durable",
        )
    return body_hash(submission.body)


def _slo_class(request: Request | api.EmbeddingRequest, submission: Submission) -> str:
    """The class of a request. Without one it gets the default, or the highest class of its tenant if the
    default is not allowed. Raises Forbidden."""
    allowed = submission.classes
    if request.slo_class in allowed:
        return request.slo_class
    if "slo_class" in request.model_fields_set:
        raise errors.Forbidden(
            f"`slo_class`: the credentials of this tenant do not allow {request.slo_class!r}, only "
            f"{', '.join(allowed)}",
            param="slo_class",
        )
    return min(allowed, key=CLASSES.index)


def encode_prompt(request: Request, output: AnswerForm | None, model: ServedModel, wall_us: int) -> list[int]:
    """The prompt's token ids. A text prompt gets the model's BOS token; ids are used unchanged. Raises
    BadRequest."""
    if isinstance(request, api.ChatRequest):
        _check_chars("messages", sum(len(message.text) for message in request.messages), model)
        messages = [message.model_dump() for message in request.messages]
        options = _template_options(request, model)
        starts = request.add_generation_prompt and not request.continue_final_message
        tools = None if output is None else output.given
        ids = model.template.encode(messages, tools, starts, wall_us, options)
    else:
        ids = _encoded("prompt", request.prompt, model)
    if not ids:
        raise errors.BadRequest("the prompt is empty", param="prompt")
    return ids


def encode_input(request: api.EmbeddingRequest, model: ServedModel) -> list[int]:
    """The token ids of an input. A text gets what the model's tokenizer puts around it, and is cut where the
    model's files set a limit; ids are used unchanged. Raises BadRequest."""
    if not request.input:
        raise errors.BadRequest("the input is empty", param="input")
    if not isinstance(request.input, str):
        return _encoded("input", request.input, model)
    vocabulary, text = model.vocabulary, model.vocabulary.vectors.prompt + request.input
    most = vocabulary.vectors.most_tokens
    if not most or not request.truncate:
        _check_chars("input", len(text), model)
        ids = vocabulary.encode_for_vector(text, 0)
        if most and len(ids) > most:
            why = f"the input has {len(ids)} tokens; shorten it, or leave out `truncate`"
            raise _over_context(most, why, "input")
        return ids
    chars = max(_CUT_CHARS * most, model.max_context) * vocabulary.longest_token_bytes
    ids = vocabulary.encode_for_vector(vocabulary.leading(text, chars), most)
    if len(ids) < most:  # it may be the rest that counts, where the tokenizer drops most characters
        _check_chars("input", len(text), model)
    return ids


def _encoded(param: str, given: str | list[int], model: ServedModel) -> list[int]:
    vocabulary = model.vocabulary
    if isinstance(given, str):
        _check_chars(param, len(given), model)
        return [*vocabulary.prefix_ids, *vocabulary.encode(given, special=True)]
    if len(given) < model.max_context:
        _check_ids(param, given, vocabulary.size)
    return given


def _template_options(request: api.ChatRequest, model: ServedModel) -> TemplateOptions:
    if request.chat_template and not model.trusts_templates:
        raise errors.BadRequest(
            "`chat_template`: this fleet takes no templates from requests (setting "
            "trust_request_chat_template); leave it out",
            param="chat_template",
        )
    given = request.model_fields_set
    if request.continue_final_message and request.add_generation_prompt and "add_generation_prompt" in given:
        raise errors.BadRequest(
            "`continue_final_message` and `add_generation_prompt` exclude each other",
            param="continue_final_message",
        )
    variables = request.chat_template_kwargs
    if taken := TemplateOptions.RESERVED & variables.keys():
        raise errors.BadRequest(
            f"`chat_template_kwargs`: {min(taken)} is not for it; it has the variables of the template",
            param="chat_template_kwargs",
        )
    if request.reasoning_effort is not None:
        variables = {"reasoning_effort": request.reasoning_effort, **variables}
    return TemplateOptions(request.chat_template or "", variables, request.continue_final_message)


def _answer_format(
    request: Request, output: AnswerForm | None, model: ServedModel, prompt: list[int]
) -> tuple[Format | None, bool]:
    """The format of the answer, and whether the prompt ends within its reasoning."""
    form, has_tools = model.answer_format, output is not None and output.given is not None
    if form is None or not isinstance(request, api.ChatRequest):
        return None, False
    if request.chat_template and model.template.has_found_form:
        form = model.template.skills(request.chat_template, with_tools=has_tools).form
    required = output is not None and output.is_all_calls
    beside = has_tools and output is not None and not required and output.has_text_grammar
    if (required and form.writes is None) or (beside and (form.writes is None or form.bare)):
        return HERMES, False  # the grammar asks for calls that have one, and that no text begins like
    if form.think is None:
        return form, False
    table = model.vocabulary.bytes_with(form.markers)
    tail = b"".join(table[i] for i in prompt[-TAIL_TOKENS:]).decode("utf-8", "replace")
    return form, tail.rstrip().endswith(form.think[0])


def _logprobs(request: Request) -> int:
    """0 for none, else 1 + the number of alternatives, as in Tokenized."""
    if request.logprobs is False:
        return 0
    return 1 + (request.top_logprobs if request.logprobs is True else request.logprobs)


def _max_tokens(request: Request, prompt_tokens: int, max_context: int, default: int = 0) -> int:
    """`default`: of the model, 0 without one."""
    room, chat = max_context - prompt_tokens, isinstance(request, api.ChatRequest)
    if room < 1:
        raise _too_long("messages" if chat else "prompt", f"{prompt_tokens} tokens", max_context)
    name, asked = request.limit
    if asked is None:
        if request.n_predict:  # -1 asks for no limit
            return room
        return min(default or room, room, room if chat else DEFAULT_COMPLETION_TOKENS)
    if asked > room:
        raise _over_context(
            max_context,
            f"the prompt has {prompt_tokens} tokens and `{name}` is {asked}; ask for at most {room}",
            name,
        )
    return asked


def _check_chars(param: str, chars: int, model: ServedModel) -> None:
    """Refuse a text that no tokenization makes short enough: its tokenization may take seconds."""
    if chars > model.max_context * model.vocabulary.longest_token_bytes:
        raise _too_long(param, f"{chars} characters", model.max_context)


def _too_long(param: str, size: str, max_context: int) -> errors.BadRequest:
    why = f"the prompt has {size}, and the answer needs at least one token; shorten the prompt"
    return _over_context(max_context, why, param)


def _over_context(max_context: int, why: str, param: str) -> errors.BadRequest:
    """Clients find OpenAI's code and the start of its sentence: it is in litellm's list of such errors."""
    limit = f"This model's maximum context length is {max_context} tokens"
    return errors.BadRequest(f"context_length_exceeded: {limit}: {why}", param=param)


_SAMPLED_AS_GIVEN = {each.name for each in fields(Sampling)} & set(api.GenerateRequest.model_fields) - {
    "top_k"
}


def _sampling(request: Request, vocabulary_size: int) -> Sampling:
    bias = sorted(request.logit_bias.items())
    _check_ids("logit_bias", [token for token, _ in bias], vocabulary_size)
    given = {name: getattr(request, name) for name in _SAMPLED_AS_GIVEN}
    return Sampling(
        top_k=max(request.top_k, 0),
        bias_ids=ints(token for token, _ in bias),
        bias_values=floats(value for _, value in bias),
        **given,
    )


def _processors(request: Request, model: ServedModel) -> tuple[str, ...]:
    packed = []
    for entry in request.logits_processors:
        if entry.name not in model.processors:
            known = ", ".join(sorted(model.processors)) or "none: the setting logits_processors is empty"
            raise errors.BadRequest(
                f"`logits_processors`: {entry.name!r:.80} is not one of this fleet; there is {known:.200}",
                param="logits_processors",
            )
        try:
            text = json.dumps({"name": entry.name, "args": entry.args}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise errors.BadRequest(
                f"`logits_processors`: the args of {entry.name!r} are not plain JSON: {error!s:.200}",
                param="logits_processors",
            ) from error
        if len(text) > MAX_PROCESSOR_CHARS:
            raise errors.BadRequest(
                f"`logits_processors`: {entry.name!r} with its args takes {len(text)} characters, over "
                f"{MAX_PROCESSOR_CHARS}; shorten the args",
                param="logits_processors",
            )
        packed.append(text)
    return tuple(packed)


def _stop_ids(request: Request, vocabulary: Vocabulary) -> list[int]:
    _check_ids("stop_token_ids", request.stop_token_ids, vocabulary.size)
    ends = () if request.ignore_eos else vocabulary.eos_ids
    return sorted({*ends, *request.stop_token_ids})


def _check_ids(param: str, ids: list[int], size: int) -> None:
    for token in ids:
        if not 0 <= token < size:
            raise errors.BadRequest(f"`{param}`: {token} is not a token id (0 to {size - 1})", param=param)
