#!/usr/bin/env bash
# llguidance 1.9.1 (https://github.com/guidance-ai/llguidance).
# Guess: a number between `minimum` and `maximum` is allowed in every plain spelling of it.
# Behaviour: with a maximum of 2.55 the grammar refuses 2.5 and allows 2.50, the same number. So a model that would
# end there must write one digit more. Up to 4.4 it refuses 4.40.
# Output seen (CPython 3.11, x86-64):
#     up to 2.55: 2.5 False, 2.50 True, 2.4 True; up to 4.4: 4.4 True, 4.40 False
# Exits 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
import json
import sys

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class Bytes:
    eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
    tokens = [*(bytes([i]) for i in range(256)), b"\xff<end>"]

    def __call__(self, text):
        return list(text)


words = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257)


def accepts(schema, text):
    matcher = LLMatcher(words, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def number(most):
    return {"type": "number", "minimum": 0, "maximum": most}


found = [accepts(number(2.55), text) for text in ("2.5", "2.50", "2.4")]
found += [accepts(number(4.4), text) for text in ("4.4", "4.40")]
print("up to 2.55: 2.5 {}, 2.50 {}, 2.4 {}; up to 4.4: 4.4 {}, 4.40 {}".format(*found))
sys.exit(found != [False, True, True, True, False])
PYTHON
