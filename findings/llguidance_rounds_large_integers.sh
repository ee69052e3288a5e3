#!/usr/bin/env bash
# llguidance 1.9.1 (https://github.com/guidance-ai/llguidance).
# Guess: a `const` that is an integer over 2^53 allows this integer, as JSON Schema says.
# Behaviour: integers of `const` and `enum` and bounds pass through a double, so the grammar allows a neighbour and
# refuses the integer itself.
# Output seen (CPython 3.11, x86-64):
#     const 9007199254740993: itself False, 9007199254740992 True
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


number = 2**53 + 1
found = accepts({"const": number}, str(number)), accepts({"const": number}, str(number - 1))
print(f"const {number}: itself {found[0]}, {number - 1} {found[1]}")
sys.exit(found != (False, True))
PYTHON
