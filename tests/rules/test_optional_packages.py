"""Heavy and optional packages are imported by what needs them, not by what stands beside it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[2:])))
"""

HEAVY = [
    "opentelemetry", "prometheus_client", "torch", "numba", "triton", "transformers", "lmcache", "nixl_cu12",
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "packages"),
    [
        ("services.launcher.cli", ["nats", "pydantic", *HEAVY]),  # `--help`
        ("services.launcher.serve", ["nats", "pydantic", *HEAVY]),  # `health`
        ("services.tokenizer.actor", HEAVY),
        ("services.scheduler.actor", ["tokenizers", *HEAVY]),
        ("services.executor.actor", HEAVY),  # the backend `sim`
        ("services.kv_offload.actor", ["tokenizers", *HEAVY]),
        ("services.detokenizer.actor", HEAVY),
        ("services.keeper.actor", ["tokenizers", *HEAVY]),
        ("services.gateway.actor", ["tokenizers", *HEAVY]),
        ("services.executor.cpu.engine", ["opentelemetry", "triton", "numba", "lmcache"]),
    ],
)
def test_a_module_does_not_import_what_it_may_not_need(module: str, packages: list[str]) -> None:
    imported = subprocess.run(
        [sys.executable, "-c", _PROGRAM, module, *packages], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not imported
