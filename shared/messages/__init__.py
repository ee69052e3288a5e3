"""Every message that crosses the wire, as frozen dataclasses, and nothing else.

The order of the fields is their position on the wire and is frozen by golden bytes
(tests/contract). New fields go last and have a default. Units are in the names: `_us` are
durations for decisions, `_wall_us` wall-clock stamps for spans only. A *sequence* (one choice of
one request, int32) is the unit of slots, token indices and results; a *token index* counts the
generated tokens of a sequence from 0. A message that carries token lists longer than
`codec.PAGE_TOKENS` travels in parts, numbered `part`/`parts`, each with its slice of `tokens`; the
first part carries the other fields.
"""

from __future__ import annotations

from shared.messages.columns import Floats, Ints, Longs, floats, ints, longs
from shared.messages.liveness import Beat
from shared.messages.requests import (
    MOVED,
    Accepted,
    Cancel,
    Chunk,
    Close,
    Decision,
    Detached,
    Ended,
    Open,
    PromptTokens,
    Rejected,
    Sampling,
    StopFound,
    Timings,
    Tokenized,
    Tokens,
    Usage,
    rejection,
)
from shared.messages.steps import (
    AuxMsg,
    ExecHello,
    ExecReset,
    ExecWelcome,
    GrammarFailed,
    GrammarReady,
    Resend,
    SlotClose,
    SlotOpen,
    StepPlan,
    StepResult,
    StreamAt,
    StreamReset,
)
from shared.messages.tiers import (
    ArenaReleased,
    KvCommit,
    KvCopied,
    KvCopy,
    KvFound,
    KvGone,
    KvLookup,
    KvPrefetch,
    KvReady,
    KvRelease,
    KvRenew,
    KvRenewed,
    KvReserve,
    KvReserved,
    KvStored,
)

Message = (
    Tokenized | Accepted | Rejected | Cancel | Open | Tokens | PromptTokens | StopFound | Detached
    | Close | Ended | ExecHello | ExecWelcome | ExecReset | SlotOpen | SlotClose | GrammarReady
    | GrammarFailed | StepPlan | StepResult | Resend | StreamReset | StreamAt | AuxMsg
    | KvLookup | KvFound | KvReserve | KvReserved | KvPrefetch | KvReady | KvCommit | KvStored
    | KvRelease | KvRenew | KvRenewed | KvGone | KvCopy | KvCopied | ArenaReleased | Beat
)  # fmt: skip

__all__ = [
    "MOVED",
    "Accepted",
    "ArenaReleased",
    "AuxMsg",
    "Beat",
    "Cancel",
    "Chunk",
    "Close",
    "Decision",
    "Detached",
    "Ended",
    "ExecHello",
    "ExecReset",
    "ExecWelcome",
    "Floats",
    "GrammarFailed",
    "GrammarReady",
    "Ints",
    "KvCommit",
    "KvCopied",
    "KvCopy",
    "KvFound",
    "KvGone",
    "KvLookup",
    "KvPrefetch",
    "KvReady",
    "KvRelease",
    "KvRenew",
    "KvRenewed",
    "KvReserve",
    "KvReserved",
    "KvStored",
    "Longs",
    "Message",
    "Open",
    "PromptTokens",
    "Rejected",
    "Resend",
    "Sampling",
    "SlotClose",
    "SlotOpen",
    "StepPlan",
    "StepResult",
    "StopFound",
    "StreamAt",
    "StreamReset",
    "Timings",
    "Tokenized",
    "Tokens",
    "Usage",
    "floats",
    "ints",
    "longs",
    "rejection",
]
