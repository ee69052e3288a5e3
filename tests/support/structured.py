"""The grammar and the tools that the fields of a request ask for, read as a tokenizer reads them."""

from __future__ import annotations

from typing import Any

from services.tokenizer import structured_output
from services.tokenizer.prepare import read_request
from services.tokenizer.structured_output import Tools


def tools_of(fields: dict[str, Any]) -> Tools | None:
    """Raises BadRequest."""
    return structured_output.read_tools(read_request({"prompt": "p", **fields}))


def grammar_of(fields: dict[str, Any]) -> str:
    """Raises BadRequest."""
    request = read_request({"prompt": "p", **fields})
    return structured_output.grammar_of(request, structured_output.read_tools(request))
