"""The last answers of each tenant: a request that was asked before, or one much like it, is often answered
with the same words. No tenant's tokens are drafts for another one.

    tenant a    ... end of a prompt | its answer | - | end of a prompt | its answer | -
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from services.executor.engine import NO_DRAFT

TENANTS = 64  # whose answers are kept: those with the latest ones
TOKENS = 8_192  # of a tenant, that are kept
LEAST = 6  # tokens that must occur: the end of a chat's prompt, up to five, is the same in all of them

_Tokens = NDArray[np.int32]


class Answers:
    """The tokens of each tenant's last answers, up to 2 MiB in all."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, _Tokens] = OrderedDict()

    def add(self, tenant: str, tokens: _Tokens) -> None:
        """An answer has ended; `tokens` begin with the end of its prompt."""
        before = self._texts.pop(tenant, np.empty(0, np.int32))
        parts = before, tokens, np.array([NO_DRAFT], np.int32)  # no draft goes beyond the end of an answer
        self._texts[tenant] = np.concatenate(parts)[-TOKENS:]
        if len(self._texts) > TENANTS:
            self._texts.popitem(last=False)

    def of(self, tenant: str, last: _Tokens) -> _Tokens | None:
        """The answers of a tenant, if the LEAST last tokens may occur there."""
        text = self._texts.get(tenant)
        if text is None or len(last) < LEAST or last[-LEAST:].tobytes() not in text.tobytes():
            return None
        return text
