#!/usr/bin/env bash
# safetensors 0.8.0 (https://github.com/huggingface/safetensors) with torch 2.13.0.
# Guess: a tensor that `get_tensor` has returned is a copy: a later write to the file does not change it. At least its
# storage tells that it belongs to a file.
# Behaviour: on a CPU the tensor is a view of the mapped file. A write in place changes its numbers, also after the
# file is closed, and `untyped_storage().filename` is None.
# Output seen (CPython 3.11, x86-64):
#     before [1.0, 1.0], after a write to the file [2.0, 2.0], file name None
# Exits 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet safetensors==0.8.0 torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - "$folder/m.safetensors" <<'PYTHON'
import os
import struct
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file

path = sys.argv[1]
save_file({"x": torch.ones(2)}, path)
with safe_open(path, framework="pt") as file:
    tensor = file.get_tensor("x")
before = tensor.tolist()
with open(path, "r+b") as file:
    file.seek(-8, os.SEEK_END)
    file.write(struct.pack("<2f", 2.0, 2.0))
after, name = tensor.tolist(), tensor.untyped_storage().filename
print(f"before {before}, after a write to the file {after}, file name {name}")
sys.exit((before, after, name) != ([1.0, 1.0], [2.0, 2.0], None))
PYTHON
