"""The fleets that are compared: without tiers, with L1, and with a small L1 above an L2."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from loadtest.real.served import Body, Served, env_of, real_env

KV_TOKEN_BYTES = 46_080  # 30 layers, keys and values, 3 heads of 64, float32
BLOCK_TOKENS = 16
MIB = 1 << 20
REDIS_START_S = 5.0
PATIENCE_S = 3_600  # of a request, on a machine with much else to do


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of memory, in tokens of KV."""

    pool_tokens: int
    l1_tokens: int
    small_l1_tokens: int
    threads: int


def environments(sizes: Sizes, l2: str) -> dict[str, dict[str, str]]:
    """Settings of each arm; `l2` is the URL of the remote tier."""
    blocks = sizes.pool_tokens // BLOCK_TOKENS
    base = real_env(sizes.threads) | env_of(
        kv_blocks=blocks, block_tokens=BLOCK_TOKENS, slots=4, max_context=blocks * BLOCK_TOKENS,
        request_timeout_s=PATIENCE_S,
    )  # fmt: skip
    return {
        "none": base | env_of(l1="off"),
        "L1": base | env_of(l1=_mib(sizes.l1_tokens)),
        "L2": base | env_of(l1=_mib(sizes.small_l1_tokens), l2=l2),
    }


def _mib(tokens: int) -> int:
    return -(-tokens * KV_TOKEN_BYTES // MIB)


@contextmanager
def remote() -> Generator[str]:
    """The URL of an L2: a redis-server of its own where this machine has one, else a folder."""
    program = shutil.which("redis-server")
    with tempfile.TemporaryDirectory() as folder:
        if program is None:
            yield f"file://{folder}"
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            process.wait(REDIS_START_S)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its reader saw it."""

    ttft_ms: float
    took_ms: float
    text: str
    prompt_tokens: int
    cached_tokens: int


async def ask(fleet: Served, body: Body) -> Answer:
    """Send it, read its stream."""
    loop = asyncio.get_running_loop()
    sent_s, first_s, text, usage = loop.time(), 0.0, "", dict[str, Any]()
    async for frame in fleet.client.stream(body, timeout_s=PATIENCE_S):
        if frame["type"] == "delta":
            first_s = first_s or loop.time()
            for choice in frame["choices"]:
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        elif frame["type"] == "done":
            usage = frame["usage"]
    return Answer(
        1e3 * (first_s - sent_s),
        1e3 * (loop.time() - sent_s),
        text,
        usage["prompt_tokens"],
        int(usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)),
    )
