#!/usr/bin/env bash
# xgrammar 0.2.8 (https://github.com/mlc-ai/xgrammar).
# Guess: a number from 1e-7 to 2e-7 is written like 0.00000015 or 1.5e-7.
# Behaviour: numbers with bounds get at most six decimals and no exponent. No such number lies in the range, and
# the grammar becomes the empty text: an answer that ends with no JSON at all.
# Output seen (CPython 3.11, x86-64):
#     root ::= ((root_1)); root_1 ::= ("")
# Exits 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps xgrammar==0.2.8 apache-tvm-ffi==0.1.15.post2
"$folder/venv/bin/pip" install --quiet pydantic==2.13.4 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import importlib
import importlib.util
import json
import sys
import types

# The package imports torch for masks, which this does not need: load its modules alone.
package = types.ModuleType("xgrammar")
package.__path__ = list(importlib.util.find_spec("xgrammar").submodule_search_locations)
sys.modules.update(xgrammar=package, torch=None)
importlib.import_module("xgrammar.load_binding")
grammar = importlib.import_module("xgrammar.grammar")

made = grammar.Grammar.from_json_schema(json.dumps({"type": "number", "minimum": 1e-7, "maximum": 2e-7}))
root = [line for line in str(made).splitlines() if line.startswith("root")]
print("; ".join(root))
sys.exit(root != ["root ::= ((root_1))", 'root_1 ::= ("")'])
PYTHON
