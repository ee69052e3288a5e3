"""`headrace.v1.detokenize.…`: ids to text, by request and reply."""

from __future__ import annotations

import json

from shared import subjects
from shared.bus import Bus, Delivery
from shared.errors import BadRequest, HeadraceError, PayloadTooLarge
from shared.replies import end_headers, error_reply, to_json
from shared.vocabulary import Vocabulary

MAX_QUESTION_BYTES = 1_048_576  # answered on the event loop: some 50 ms of it


def answer(bus: Bus, model: str, vocabulary: Vocabulary, asked: Delivery) -> None:
    """Reply with the text of the ids in `asked`, or a typed error."""
    if not subjects.is_inbox(asked.reply):
        return
    try:
        bus.publish(asked.reply, to_json({"model": model, "text": decode_body(asked.data, vocabulary)}))
    except HeadraceError as error:  # the text may be over the server's limit, too
        bus.publish(asked.reply, error_reply(error, "", ""), headers=end_headers(error))


def decode_body(data: bytes, vocabulary: Vocabulary) -> str:
    """The text that a `detokenize` request asks for: `{"tokens": [ids]}`. Raises BadRequest,
    PayloadTooLarge."""
    if len(data) > MAX_QUESTION_BYTES:
        raise PayloadTooLarge(
            f"a question of {len(data)} bytes is over {MAX_QUESTION_BYTES}: ask in smaller parts",
            param="tokens",
        )
    try:
        tokens = json.loads(data)["tokens"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BadRequest('send {"tokens": [1, 2, 3]}', param="tokens") from None
    valid = isinstance(tokens, list) and all(type(t) is int and 0 <= t < vocabulary.size for t in tokens)
    if not valid:
        raise BadRequest(
            f"`tokens`: a list of ids from 0 to {vocabulary.size - 1} is expected", param="tokens"
        )
    return vocabulary.decode(tokens)
