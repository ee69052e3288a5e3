"""The grammar and the tools that the fields of a request ask for, read as a tokenizer reads them."""

from __future__ import annotations

from typing import Any

from services.tokenizer import structured_output
from services.tokenizer.prepare import read_request
from services.tokenizer.structured_output import Tools
from shared.api import Tool


def tools_of(fields: dict[str, Any]) -> Tools | None:
    """Raises BadRequest."""
    return structured_output.read_tools(read_request({"prompt": "p", **fields}))


def grammar_of(fields: dict[str, Any]) -> str:
    """Raises BadRequest."""
    request = read_request({"prompt": "p", **fields})
    return structured_output.grammar_of(request, structured_output.read_tools(request))


def given_of(tools: list[dict[str, Any]]) -> list[Tool]:
    """These tools as a chat template gets them."""
    found = tools_of({"tools": tools})
    assert found is not None, "no tool was given"
    return found.given
