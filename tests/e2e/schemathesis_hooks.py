"""For schemathesis (SCHEMATHESIS_HOOKS): most requests are for the model that is there, and short.

Without it nearly all would end at "no such model" or at a token id that no vocabulary has, and the others
would take as long as they like. A limit of `timeout_s` that passes is a 504 that was asked for.

The check `allowed_by_the_schema` is stricter than schemathesis' own: what the schema allows may be refused
only for a reason in REASONS, which a JSON Schema cannot express, and the answer must name it.
"""

from __future__ import annotations

import os
import re
from typing import Any

import schemathesis

MODEL = "smollm2-135m-instruct"
TOKENS = 49_152
OLLAMA = ("/api/chat", "/api/generate")
RESPONSES = "/v1/responses"
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "min_tokens")
MOST = {**dict.fromkeys(_LIMITS, 4), "n": 3, "dimensions": 64}
SHORT = None if "API_FUZZ_S" in os.environ else 64  # inputs of one request: 2,048 take seconds each
BUSY = (404, 409, 413, 429)  # no such model, the same id, too large, too many
REASONS = re.compile(
    "context_length_exceeded|no executor of this model can follow a grammar|cannot be followed"
    "|is not a schema|`tools` has no such function|of one of `tools`(, or .*)? is expected"
    "|`tools` has not all of these functions|an answer has at most"
    "|two functions have the same name|takes no templates from requests|exclude each other"
    "|is not one of this fleet|ids from 0 to|`input` has no message"
    "|an id of this stream is expected|a URL like https|is for `background: true` alone|this fleet calls none"
    "|only the tokens of a submitted request are kept|`session_id` is missing beside it"
    "|the session itself is no parent of it|has places for adapters: start them with"
)


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: Any) -> None:
    """Change what was generated to be right; what is wrong on purpose stays as it is."""
    body = case.body
    if case.path in OLLAMA and isinstance(body, dict) and isinstance(body.get("options") or {}, dict):
        # By default an answer fills the context, also one to a request with a flaw that has no effect.
        body["options"] = options = {"num_predict": 4, **(body.get("options") or {})}
        if options["num_predict"] in (-1, -2):
            options["num_predict"] = 4
    if case.path == RESPONSES and isinstance(body, dict) and body.get("max_output_tokens") is None:
        body["max_output_tokens"] = 4
    if not isinstance(body, dict) or case.meta is None or not case.meta.generation.mode.is_positive:
        return
    model, limit_s = body.get("model"), body.get("timeout_s")
    if isinstance(model, str) and len(model) % 4:
        body["model"] = MODEL
    if type(limit_s) in (int, float) and limit_s > 0:
        body["timeout_s"] = max(limit_s, 30)
    for name, most in MOST.items():
        if type(body.get(name)) in (int, float):
            body[name] = min(body[name], most)
    if case.path.endswith("/completions"):
        body["max_tokens"] = body.get("max_tokens") or 4
    if case.path in OLLAMA and isinstance(body.get("options"), dict):
        body["options"]["num_predict"] = 4
    given = "input" if "embed" in case.path else "prompt"
    for name in (given, "tokens", "stop_token_ids"):
        if name in body:
            body[name] = _known(body[name])
    if isinstance(body.get("input"), list) and "embed" in case.path:
        body["input"] = body["input"][:SHORT]
    if isinstance(body.get("logit_bias"), dict):
        body["logit_bias"] = {str(int(k) % TOKENS): v for k, v in body["logit_bias"].items()}


def _known(value: Any) -> Any:
    """Ids of the vocabulary, and no empty prompt."""
    if value in ("", []):
        return "x" if value == "" else [1]
    if type(value) in (int, float) and value >= 0:
        return int(value) % TOKENS
    return [_known(item) for item in value] if isinstance(value, list) else value


@schemathesis.check
def allowed_by_the_schema(
    context: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """A request that follows the schema is refused for REASONS alone."""
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code in BUSY:
        return
    refused = 400 <= response.status_code < 500
    assert not refused or REASONS.search(response.text), f"{response.status_code}: {response.text[:500]}"
