"""What can be wrong with a log or a snapshot."""

from __future__ import annotations

from shared.errors import BadRequest, EngineError


class LogError(BadRequest):
    """A file is no event log, is damaged, or is of another version."""


class FreezeError(EngineError):
    """Something in the state, or in a snapshot, has no frozen form."""
