"""Heavy and optional packages are imported by what needs them, not by what stands beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

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


def test_the_lock_for_gpus_differs_by_torch_and_its_triton_alone() -> None:
    """Its torch and Triton are those that the kernels were measured with."""
    plain, cuda = (
        {line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")}
        for name in ("constraints.txt", "constraints-cuda.txt")
    )
    assert {line.partition("==")[0] for line in plain ^ cuda} == {"torch", "triton"}
    assert {"torch==2.11.0", "triton==3.6.0"} <= cuda
