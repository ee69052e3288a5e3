"""Whether a step comes in two halves, the ranks' talk of one under the compute of the other.

    off          never                    auto   from as many tokens on as the executor found at its start to
    two_stream   wherever it is offered          be quicker: below, halves read the weights twice for nothing

Steps of decodes alone are whole: their talks are short, and go with the norms behind them. The plan carries
the decision, so that the ranks need no vote (DeepSeek's prefill, LightLLM's and SGLang's two-batch overlap).
"""

from __future__ import annotations

from services.scheduler.columns import Columns
from services.scheduler.state import Executor, State

MODES = ("auto", "off", "two_stream")


def two_stream(state: State, executor: Executor, columns: Columns) -> bool:
    """The decision for the step of these columns."""
    since_tokens, mode = executor.hello.two_stream_tokens, state.limits.comm
    if not since_tokens or mode == "off" or not columns.chunks:
        return False
    return mode == "two_stream" or columns.shape.tokens >= since_tokens
