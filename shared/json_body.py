"""A JSON body from a client: UTF-8, and whole characters only.

JSON may spell half a character (`\ud800`), Python keeps it in a string, and whatever writes that string
later, a header or a frame, fails. So it goes no further than the edge.
"""

from __future__ import annotations

import json
import re
from typing import Any

from shared.errors import BadRequest

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # most bodies hold none and are not looked at again


def read_json(body: bytes) -> Any:
    """The value. Raises ValueError for what is no JSON in UTF-8, RecursionError, BadRequest for a field with
    half a character."""
    value = json.loads(body.decode())  # of bytes json.loads takes UTF-16, and halves in UTF-8, too
    if _HALF.search(body) and isinstance(value, dict):
        refuse_odd_values(value)
    return value


def refuse_odd_values(fields: dict[str, Any]) -> None:
    """Raises BadRequest that names the first field which JSON in UTF-8 cannot carry."""
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
