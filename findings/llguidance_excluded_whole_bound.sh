#!/usr/bin/env bash
# llguidance 1.9.1 (https://github.com/guidance-ai/llguidance).
# Guess: a number that `exclusiveMinimum` or `exclusiveMaximum` excludes is refused in every spelling.
# Behaviour: a whole bound that is excluded is allowed if the other bound is less than 1 away. Above 0 and up to 0.5
# the grammar takes 0, below 0 and from -0.5 it takes -0; above 0 and up to 1 it refuses 0, as it refuses 0.0.
# Output seen (CPython 3.11, x86-64):
#     up to 0.5: 0 True, 0.0 False; from -0.5: -0 True; up to 1: 0 False
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


def above_0(most):
    return {"type": "number", "exclusiveMinimum": 0, "maximum": most}


below_0 = {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}
found = [accepts(above_0(0.5), "0"), accepts(above_0(0.5), "0.0"), accepts(below_0, "-0"), accepts(above_0(1), "0")]
print("up to 0.5: 0 {}, 0.0 {}; from -0.5: -0 {}; up to 1: 0 {}".format(*found))
sys.exit(found != [True, False, True, False])
PYTHON
