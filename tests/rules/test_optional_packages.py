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


@pytest.mark.parametrize(
    ("module", "packages"),
    [
        ("services.launcher.cli", ["nats", "opentelemetry", "torch", "lmcache", "pydantic"]),  # `--help`
        (
            "services.launcher.serve",
            ["nats", "opentelemetry", "torch", "lmcache", "pydantic"],
        ),  # `health`
        ("services.tokenizer.actor", ["opentelemetry", "torch", "lmcache"]),
        ("services.scheduler.actor", ["opentelemetry", "torch", "lmcache", "tokenizers"]),
        ("services.executor.actor", ["opentelemetry", "torch", "lmcache", "numba"]),  # the backend `sim`
        ("services.kv_offload.actor", ["opentelemetry", "torch", "lmcache", "tokenizers"]),
        ("services.detokenizer.actor", ["opentelemetry", "torch", "lmcache"]),
        ("services.gateway.actor", ["opentelemetry", "torch", "lmcache", "tokenizers"]),
        ("services.executor.cpu.engine", ["opentelemetry", "triton", "numba", "lmcache"]),
    ],
)
def test_a_module_does_not_import_what_it_may_not_need(module: str, packages: list[str]) -> None:
    imported = subprocess.run(
        [sys.executable, "-c", _PROGRAM, module, *packages], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not imported
