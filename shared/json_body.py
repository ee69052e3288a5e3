"""Reads a JSON body from a client: UTF-8, without lone surrogates.

JSON may spell half a character (`\ud800`), and Python keeps it in a string. Writing that string to a header
or a frame would fail later, so the gateway and the tokenizer refuse it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from shared.errors import BadRequest

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # most bodies have none and need no second check


def read_json(body: bytes) -> Any:
    """The value. Raises ValueError for a body that is not JSON in UTF-8, RecursionError, and BadRequest for a
    field with half a character."""
    value = json.loads(body.decode())  # from bytes json.loads would accept UTF-16, and halves in UTF-8
    if _HALF.search(body) and isinstance(value, dict):
        refuse_odd_values(value)
    return value


def refuse_odd_values(fields: dict[str, Any]) -> None:
    """Raises BadRequest with the name of the first field that JSON in UTF-8 cannot carry."""
    for name, value in fields.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except RecursionError:
            raise BadRequest(
                f"`{name:.40}` is nested too deeply; send a flat value", param=name[:40]
            ) from None
        except UnicodeEncodeError:
            shown = name.encode("utf-8", "replace").decode()
            raise BadRequest(
                f"`{shown:.40}` holds a lone surrogate, one half of a UTF-16 pair: send whole characters",
                param=shown[:40],
            ) from None
        except TypeError as error:
            raise BadRequest(f"`{name:.40}` is no JSON: {error!s:.80}", param=name[:40]) from None
