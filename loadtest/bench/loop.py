"""The event loop of the client: uvloop if it is installed."""

from __future__ import annotations

import asyncio


def runner() -> asyncio.Runner:
    """Use as a context, or run one coroutine with it."""
    try:
        import uvloop
    except ImportError:  # half as fast, and as exact
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
