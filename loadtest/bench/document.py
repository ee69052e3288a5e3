"""A result as a file: the flags, versions, machine, and every run of a sweep."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from loadtest.bench.machine import circumstances
from shared.errors import BadRequest

FORMAT = 1
Result = dict[str, Any]


def document(label: str, configuration: dict[str, Any], server: dict[str, Any]) -> Result:
    """A result that has no runs yet."""
    return {
        "headrace_bench": FORMAT,
        "label": label,
        **circumstances(),
        "server": server,
        "configuration": configuration,
        "runs": [],
    }


def write(result: Result, path: Path) -> None:
    """One line for each list of requests, so that the rest can be read. Raises BadRequest."""
    text = json.dumps({**result, "runs": []}, indent=1)
    runs = ",\n".join(_run(run) for run in result["runs"])
    try:
        path.write_text(text.replace('"runs": []', f'"runs": [\n{runs}\n ]') + "\n")
    except OSError as error:
        raise BadRequest(f"{path} cannot be written: {error.strerror}") from None


def text_of(path: Path) -> str:
    """The text of a result, also of a committed one, which is compressed (`.gz`). Raises OSError."""
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()


def read(path: Path) -> Result:
    """Raises BadRequest."""
    try:
        result = json.loads(text_of(path))
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise BadRequest(f"{path} is not JSON: {error}") from None
    if not isinstance(result, dict) or result.get("headrace_bench") != FORMAT:
        raise BadRequest(f"{path} is no result of `headrace bench run --json` (format {FORMAT})")
    return result


def _run(run: dict[str, Any]) -> str:
    short = {name: value for name, value in run.items() if name != "requests"}
    text = json.dumps(short, indent=1).removesuffix("\n}")
    return f'{text},\n "requests": {{\n{_columns(run["requests"].items())}\n }}\n}}'


def _columns(columns: Iterable[tuple[str, list[Any]]]) -> str:
    return ",\n".join(f'  "{name}": {json.dumps(each, separators=(",", ":"))}' for name, each in columns)
