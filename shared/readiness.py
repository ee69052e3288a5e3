"""What a request needs to succeed: a ready service of each kind that it passes, and proof by a real one.

kv_offload is not among them, since without it requests are merely recomputed.
"""

from __future__ import annotations

from shared.peers import Peers

NEEDED = ("tokenizer", "scheduler", "executor", "detokenizer")
PROBE_TIMEOUT_S = 60.0


def missing(peers: Peers) -> list[str]:
    """The kinds of which no actor is ready."""
    return [kind for kind in NEEDED if not peers.ready(kind)]


def probe(model: str) -> dict[str, object]:
    """A request of one token."""
    return {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
