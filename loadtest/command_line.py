"""The command line of a program, and its report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def parser_of(module: str, text: str | None, *, up: bool = False) -> argparse.ArgumentParser:
    """A parser with `--out` and the module's text as its description. With `up` what follows `--` is
    `given.up`, the flags of `headrace up`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m loadtest.{module}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="a file for the report, in JSON")
    if up:
        parser.add_argument("up", nargs="*", help="flags of `headrace up`, after --")
    return parser


def report(found: Any, out: Path | None, shown: Any = None) -> None:
    """Print the report, or what `shown` is instead, and write it to `out`."""
    print(json.dumps(found if shown is None else shown, indent=1), flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
