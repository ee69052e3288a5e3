#!/usr/bin/env bash
# transformers 5.23.0 (https://github.com/huggingface/transformers), configurations alone.
# Guess: the rotation that a configuration of Olmo 3 or Gemma 3 gives without naming a kind of layer, by `rope_theta` or
# by `rope_parameters`, counts for all layers, or is refused.
# Behaviour: `rope_theta` of Olmo 3 counts for layers with full attention alone; those with a window get 500,000.
# `rope_parameters` without kinds stay beside new default entries for both kinds, which the models then read: theta of
# Olmo 3 and the scaling of Gemma 3 are without effect, and no warning is logged.
# Output seen (CPython 3.11, x86-64):
#     Olmo 3, rope_theta: full 1000000.0 sliding 500000.0
#     Olmo 3, rope_parameters: full 500000.0 sliding 500000.0
#     Gemma 3, linear scaling by 8: full default
# Exits 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON'
import sys

from transformers import Gemma3TextConfig, Olmo3Config

given = {"rope_type": "default", "rope_theta": 1_000_000.0}
thetas = []
for name, config in (
    ("rope_theta", Olmo3Config(rope_theta=1_000_000.0, num_hidden_layers=4)),
    ("rope_parameters", Olmo3Config(rope_parameters=dict(given), num_hidden_layers=4)),
):
    full, sliding = (config.rope_parameters[f"{kind}_attention"]["rope_theta"] for kind in ("full", "sliding"))
    print(f"Olmo 3, {name}: full {full} sliding {sliding}")
    thetas.append((full, sliding))
scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0}
gemma = Gemma3TextConfig(rope_parameters=scaled, num_hidden_layers=6)
kind = gemma.rope_parameters["full_attention"]["rope_type"]
print(f"Gemma 3, linear scaling by 8: full {kind}")
sys.exit((thetas, kind) != ([(1_000_000.0, 500_000.0), (500_000.0, 500_000.0)], "default"))
PYTHON
