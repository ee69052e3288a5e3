"""The bytes of the checkpoints of one answer, by its length and speed. No server and no time: sizes alone.

    python -m loadtest.checkpoint_bytes --out checkpoint_bytes.json

`each_64` is what a checkpoint after each 64 tokens would take.
"""

from __future__ import annotations

import argparse
import json
from array import array
from pathlib import Path
from typing import Any

from services.detokenizer.durable.checkpoints import GROWN, TURN_S, is_due
from shared.checkpoints import body_hash, pack
from shared.messages import Tokenized, ints

CASES = ((100, 2_000, 50), (100, 32_768, 50), (100, 32_768, 1_000), (30_000, 2_000, 50))


def size(prompt: int, generated: int) -> int:
    """Bytes of a checkpoint, with the ids of a usual request."""
    request = "0123456789abcdef012345"
    return len(
        pack(
            Tokenized(
                request=request, attempt=1, tenant="public", model="smollm2-135m-instruct",
                inbox=f"_INBOX.public.headrace-keeper.{request}", timeout_us=86_400_000_000,
                received_wall_us=10**15, sent_wall_us=10**15, handled_wall_us=10**15,
                max_tokens=generated + 1, finish_detached=True, seed=2**63, stop_ids=ints([2]),
                age_us=10**7, first_us=10**5,
                tokens=array("i", [40_000]) * (prompt + generated), generated=ints([generated]),
                reasons=("",), model_digest="a" * 32, answer_format="hermes", checkpoints=body_hash(b""),
            ),
            None,
        )
    )  # fmt: skip


def checkpoints(prompt: int, tokens: int, per_second: int) -> dict[str, Any]:
    """All checkpoints of an answer of so many tokens at a steady speed."""
    found, before, at_s, now_s = list[int](), 0, 0.0, TURN_S
    while (generated := int(now_s * per_second)) < tokens:
        if is_due(generated - before, prompt + generated, int((now_s - at_s) * 1e6)):
            found.append(size(prompt, generated))
            before, at_s = generated, now_s
        now_s += TURN_S
    return {
        "prompt": prompt, "tokens": tokens, "per_second": per_second, "checkpoints": len(found),
        "last_bytes": found[-1], "bytes": sum(found), "bytes_a_second": round(sum(found) / now_s),
        "each_64": sum(size(prompt, n) for n in range(GROWN, tokens, GROWN)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    report = [checkpoints(*case) for case in CASES]
    print(json.dumps(report, indent=1))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
