"""Times sleep and wake of an engine, and compares its answers before and after; prints JSON.

    python -m loadtest.gpu.sleep                                  a random 8B on the GPU
    python -m loadtest.gpu.sleep --model smollm2-135m-instruct --device cpu

Each round: greedy answers to some prompts, sleep, wake, the same answers with their log probabilities. Memory
is what the device reports as used, on a CPU the resident set of this process.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch

from loadtest.driver import Driver
from loadtest.gpu.shape import LLAMA_8B
from services.executor.checkpoint.loader import TorchOptions, device_of
from services.executor.engine import Backend, Sleeper
from shared.config import load
from shared.vocab.files import resolve

PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 96, 32
_CHUNK_TOKENS = 32


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu.sleep", description=__doc__)
    parser.add_argument("--model", default="", help="a name or path; empty: a random Llama 8B")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--blocks", type=int, default=0, help="KV blocks; 0: as the free memory allows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = measure(given.model, given.device, given.blocks, given.rounds)
    print(json.dumps(found, indent=1))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


def measure(model: str, device: str, blocks: int, rounds: int) -> dict[str, Any]:
    """The figures of one engine. Raises AssertionError if an answer has changed."""
    on_gpu = device_of(device).type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        if model:
            path = resolve(model, load().settings.cache_dir).path
        else:
            (path / "config.json").write_text(json.dumps(LLAMA_8B))
        options = TorchOptions(
            model_path=path, model_name=model or "dummy-8b", dummy=not model, device=device, blocks=blocks,
            slots=PROMPTS, max_step_tokens=512, max_context=1024,
        )  # fmt: skip
        began_s = time.monotonic()
        backend = _build(options, on_gpu=on_gpu)
        backend.warm_up()
        start_s = time.monotonic() - began_s
        wanted, found = answers(backend), []
        for _ in range(rounds):
            found.append(_round(backend, wanted, on_gpu=on_gpu))
            print(found[-1], flush=True)
        info = backend.info
        backend.close()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "model": info.model,
        "dtype": info.dtype,
        "weights_and_kv_gib": round(info.memory_bytes / 2**30, 2),
        "kv_gib": round(info.blocks * info.bytes_per_block / 2**30, 2),
        "start_s": round(start_s, 2),
        "rounds": found,
        "answers_equal": True,
    }


def _build(options: TorchOptions, *, on_gpu: bool) -> Backend:
    if on_gpu:
        from services.executor.cuda.engine import build as build_on_gpu

        return build_on_gpu(options)
    from services.executor.cpu.engine import build

    return build(options)


def _round(backend: Backend, wanted: list[list[float]], *, on_gpu: bool) -> dict[str, float]:
    sleeper, used_mib = cast("Sleeper", backend), _used_mib(on_gpu=on_gpu)
    backend.reset()
    began_s = time.monotonic()
    sleeper.sleep()
    slept_s, asleep_mib = time.monotonic(), _used_mib(on_gpu=on_gpu)
    begun_s = time.monotonic()
    sleeper.wake()
    awake_s = time.monotonic()
    *ids, scores = answers(backend)
    ended_s = time.monotonic()
    assert ids == wanted[:-1], "an answer has changed by the sleep"
    assert answers(backend)[:-1] == wanted[:-1], "an answer has changed later"
    return {
        "sleep_s": round(slept_s - began_s, 3),
        "wake_s": round(awake_s - begun_s, 3),
        "first_answers_s": round(ended_s - awake_s, 3),
        "next_answers_s": round(time.monotonic() - ended_s, 3),
        "logprobs_differ_by": max(abs(a - b) for a, b in zip(scores, wanted[-1], strict=True)),
        "awake_mib": used_mib,
        "asleep_mib": asleep_mib,
        "awake_again_mib": _used_mib(on_gpu=on_gpu),
    }


def answers(backend: Backend) -> list[list[float]]:
    """Greedy answers, all rows in one batch: ids, and then their log probabilities."""
    driver, ids, scores = Driver(backend), [list[float]() for _ in range(PROMPTS)], []
    tables, room = {}, PROMPT_TOKENS + ANSWER_TOKENS
    for slot in range(PROMPTS):
        tokens = [(slot * 7919 + i * 31) % 1000 + 300 for i in range(PROMPT_TOKENS)]
        _, tables[slot] = driver.open_with(slot, tokens, room, logprobs=1)
    for start in range(0, PROMPT_TOKENS, _CHUNK_TOKENS):
        last = start + _CHUNK_TOKENS == PROMPT_TOKENS
        rows = [(slot, start, _CHUNK_TOKENS, False) for slot in tables]
        plan = driver.plan(rows, {} if start else tables, samples=last)
        output = backend.sample(backend.forward(plan))
    for at in range(PROMPT_TOKENS, room):
        for slot, (token, score) in enumerate(zip(output.ids, output.logprobs, strict=True)):
            ids[slot].append(token)
            scores.append(score)
        output = backend.sample(backend.forward(driver.plan([(slot, at, 1, True) for slot in tables], {})))
    driver.close()
    return [*ids, scores]


def _used_mib(*, on_gpu: bool) -> int:
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
        return (total - free) >> 20
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 >> 20


if __name__ == "__main__":
    main()
