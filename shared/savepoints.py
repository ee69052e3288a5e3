"""The savepoint of a durable request: the request with its tokens so far, as stream HR_STATE has it.

    <version> <hash of the submitted body>       a line, which the keeper compares
    [row of Tokenized, row of Tokens or nil]     msgpack, for the detokenizer

The Tokenized is the one that a detokenizer sends to another scheduler (services/detokenizer/failover.py); the
Tokens, if log probabilities are asked for, have those of all its generated tokens.
"""

from __future__ import annotations

from hashlib import sha256

import msgpack

from shared import codec
from shared.errors import WireError
from shared.messages import Tokenized, Tokens

VERSION = 1
HASH_DIGITS = 32


def body_hash(body: bytes) -> str:
    """The hash of a request's body, as a keeper sends it to a tokenizer."""
    return sha256(body).hexdigest()[:HASH_DIGITS]


def pack(resumption: Tokenized, scores: Tokens | None) -> bytes:
    """The savepoint of a request; `resumption.savepoints` is the hash of its body."""
    rows = [codec.to_row(resumption), None if scores is None else codec.to_row(scores)]
    return _head(resumption.savepoints) + bytes(msgpack.packb(rows))


def is_of(savepoint: bytes, body: bytes) -> bool:
    """Whether a savepoint is of this version, and of the request with this body."""
    return savepoint.startswith(_head(body_hash(body)))


def unpack(savepoint: bytes) -> tuple[Tokenized, Tokens | None]:
    """The request with its tokens, and their log probabilities. Raises WireError."""
    try:
        request, scores = msgpack.unpackb(savepoint.partition(b"\n")[2])
        resumption, scored = codec.from_row(request), None if scores is None else codec.from_row(scores)
    except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
        raise WireError(f"not a savepoint: {error!s:.80}") from None
    if not isinstance(resumption, Tokenized) or not resumption.generated:
        raise WireError("not a savepoint: it has no request with tokens")
    prompt = len(resumption.tokens) - sum(resumption.generated)
    wrong = codec.validation_error(resumption)
    if scored is not None:
        same = isinstance(scored, Tokens) and scored.ids == resumption.tokens[prompt:]
        wrong = wrong or codec.validation_error(scored) or ("" if same else "its scores are of other tokens")
    if wrong or prompt < 1 or (scored is None) != (not resumption.logprobs):
        raise WireError(f"not a savepoint: {wrong or 'its parts do not fit together'}")
    assert scored is None or isinstance(scored, Tokens)
    return resumption, scored


def _head(digest: str) -> bytes:
    return f"{VERSION} {digest}\n".encode()
