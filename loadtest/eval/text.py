"""Cuts a text into windows of tokens, by the convention of llama.cpp's `llama-perplexity`.

    | window 0: half of it context, half scored | window 1: the same | ...          a rest at the
    |                                                                               end is left out

The first half of a window gives each scored token a context of at least that length. Position i is scored by
the token after it, so the last position of a window is not scored.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from loadtest.scenarios.traces import SAMPLES
from services.executor.checkpoint.config import from_hf
from shared.errors import BadRequest
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import load_vocabulary

TEXT = SAMPLES / "alice.txt"
_FIRST_ID = 3  # random ids keep off what often is a special token
_RANDOM_WINDOWS = 16


def windows(
    tokens: Sequence[int], context: int, most: int = 0, prefix: Sequence[int] = ()
) -> list[list[int]]:
    """Whole windows of `context` tokens, at most `most` (0: all); each starts with `prefix`, in the place of
    as many tokens of its own. Raises BadRequest when there is none."""
    count = len(tokens) // context
    if not count:
        raise BadRequest(
            f"the text has {len(tokens)} tokens, less than a window of {context}: a longer text, or --context"
        )
    starts = range(0, min(count, most or count) * context, context)
    return [[*prefix, *tokens[start + len(prefix) : start + context]] for start in starts]


def scored(context: int) -> range:
    """The positions of a window whose next token is scored."""
    return range(context // 2, context - 1)


def read_windows(path: Path, files: ModelFiles, context: int, most: int = 0) -> list[list[int]]:
    """The windows of a file. A model without a vocabulary, weights alone, gets random ids in the place of a
    text. Raises BadRequest, SetupError."""
    if files.path.is_dir() and not (files.path / "tokenizer.json").is_file():
        return _random_windows(files, context, most or _RANDOM_WINDOWS)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} cannot be read as text ({error}): give another with --text") from None
    vocabulary = load_vocabulary(files)
    return windows(vocabulary.encode(text), context, most, vocabulary.prefix_ids)


def _random_windows(files: ModelFiles, context: int, count: int) -> list[list[int]]:
    vocab = from_hf(json.loads((files.path / "config.json").read_text())).vocab
    rng, ids = random.Random(0), range(_FIRST_ID, vocab)
    return windows(rng.choices(ids, k=count * context), context)
