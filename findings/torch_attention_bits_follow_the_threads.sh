#!/usr/bin/env bash
# torch 2.13.0 (https://github.com/pytorch/pytorch), `scaled_dot_product_attention` on a CPU.
# Guess: an intra-op thread is a matter of time: the same query, keys and values give the same bits with one and with two
# threads, since no thread adds to another's sum.
# Behaviour: with a mask, one query row a head and two heads, the last bits differ for every odd number of keys, and for no
# even one. They repeat with the same number of threads, so an engine that changes it between steps changes its logits.
# Output seen (CPython 3.11, AMD Zen 5; the same with ATEN_CPU_CAPABILITY=avx2):
#     other bits with 33, 35, 37, ... 63 keys; the largest difference is below 1e-6
# Exits 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
odd, largest = [], 0.0
for keys in range(32, 64):
    query = torch.randn(1, 2, 2, 16)
    key, value, mask = torch.randn(1, 2, keys, 16), torch.randn(1, 2, keys, 16), torch.zeros(1, 1, 1, keys)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(scaled_dot_product_attention(query, key, value, attn_mask=mask))
    if not results[0].equal(results[1]):
        odd.append(keys)
        largest = max(largest, float((results[0] - results[1]).abs().max()))
print(f"other bits with {', '.join(map(str, odd))} keys; the largest difference is {largest:.1e}")
sys.exit(odd != list(range(33, 64, 2)) or largest > 1e-6)
PYTHON
