"""Measures the first requests after "ready" against later ones, through `headrace up --backend dummy`.

Rounds of 32 requests (1,024 tokens in, 32 out), one after the other from the moment that `up` is ready: L1
is pinned meanwhile, and no kernel may be compiled. Prints the time of each round, the wait of its readers,
how much of L1 the executor had by then, and which kernels it compiled under requests.

    python -m loadtest.gpu.first_requests --out first.json                  (each start is a new process)
    python -m loadtest.gpu.first_requests --bare                            (with an empty Triton cache)

The goal: the first round takes at most 1.2 times the median of the later rounds that had all of L1.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from loadtest.command_line import parser_of, report
from loadtest.fleet import MODEL, Fleet, connected, running_up
from loadtest.gpu.readers import FIRST_ID, LAST_ID, body_of, figures, read_all
from loadtest.gpu.serve import write_model
from loadtest.gpu.shape import LLAMA_8B

AT_ONCE, PROMPT, ANSWER = 32, 1024, 32
GOAL = 1.2
AFTER = 4  # rounds with all of L1


async def round_of(fleet: Fleet, number: int, vocab: int) -> dict[str, Any]:
    """32 requests at once, whose prompts no other round has."""
    rng = random.Random(number)
    prompts = [[rng.randrange(FIRST_ID, min(LAST_ID, vocab)) for _ in range(PROMPT)] for _ in range(AT_ONCE)]
    asked = [body_of(f"{number}-{i}", prompt, ANSWER) for i, prompt in enumerate(prompts)]
    seen = figures(await read_all(fleet.client, asked, AT_ONCE))
    generation = (await fleet.executor()).get("arena_generation", 0)
    found = {name: round(seen[name], 3) for name in ("seconds", "ttft_p50_ms", "ttft_p99_ms", "itl_max_ms")}
    print(json.dumps({**found, "arena_generation": generation}), flush=True)
    return {**found, "arena_generation": generation}


async def rounds(pid: int, url: str, vocab: int, patience_s: float) -> list[dict[str, Any]]:
    """From now on until L1 is there, and some more; without L1 in that time those that there were."""
    found: list[dict[str, Any]] = []
    until_s, after = time.monotonic() + patience_s, 0
    async with connected(url) as client:
        while after < AFTER and time.monotonic() < until_s:
            found.append(await round_of(Fleet(pid, url, client), len(found), vocab))
            after += bool(found[-1]["arena_generation"])
    return found


def main() -> None:
    """The command line."""
    parser = parser_of("gpu.first_requests", __doc__)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--patience", type=float, default=120.0, help="longest wait for L1, s")
    parser.add_argument("--bare", action="store_true", help="each start compiles its kernels anew")
    parser.add_argument("--flags", default="--device cuda --max-context 8192", help="of `up`")
    parser.add_argument("--shape", type=Path, help="a config.json in place of that of Llama-3.1-8B")
    given = parser.parse_args()
    found = []
    config = json.loads(given.shape.read_text()) if given.shape else LLAMA_8B
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), config)
        flags = ["--backend", "dummy", "--model", folder, "--model-name", MODEL, *given.flags.split()]
        for start in range(given.starts):
            log = Path(folder) / f"log{start}"
            env = {"TRITON_CACHE_DIR": f"{folder}/kernels{start}"} if given.bare else {}
            began_s = time.monotonic()
            with running_up(flags, env, str(log)) as (pid, url):
                ready_s = time.monotonic() - began_s
                seen = asyncio.run(rounds(pid, url, config["vocab_size"], given.patience))
            later = [one["seconds"] for one in seen[1:] if one["arena_generation"]] or [
                one["seconds"] for one in seen[1:]
            ]
            ratio = seen[0]["seconds"] / statistics.median(later) if later else None
            found.append({
                "ready_s": round(ready_s, 2), "first_to_later": ratio,
                "reached": ratio is not None and ratio <= GOAL,
                "compiled": re.findall(r"compiled under a request.*", log.read_text()), "rounds": seen,
            })  # fmt: skip
    report({"flags": given.flags, "bare": given.bare, "starts": found}, given.out)
    raise SystemExit(0 if all(one["reached"] for one in found) else 1)


if __name__ == "__main__":
    main()
