"""A result as one HTML file: the flags, the figures of every run and their pictures, all embedded."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from loadtest.bench.block import block
from loadtest.bench.compare import compare, point_name
from loadtest.bench.document import Result

STYLE = (
    "body{font:15px system-ui;max-width:80em;margin:2em auto;padding:0 1em}"
    "pre{font-size:13px;overflow-x:auto;background:#f6f6f6;padding:1em}img{max-width:100%}"
    "section{display:flex;flex-wrap:wrap;gap:1em}"
)
ABOUT = ("date", "commit", "server", "machine", "versions", "configuration")


def page(results: Sequence[Result], pictures: Iterable[Path]) -> str:
    """Two results of one sweep are compared, too."""
    return (
        f"<!doctype html><meta charset=utf-8><title>headrace bench</title><style>{STYLE}</style>"
        + "\n".join(_parts(results, pictures))
    )


def _parts(results: Sequence[Result], pictures: Iterable[Path]) -> Iterator[str]:
    yield f"<h1>{escape(' and '.join(result['label'] for result in results))}</h1>"
    for picture in pictures:
        data = b64encode(picture.read_bytes()).decode()
        yield f'<p><img alt="{escape(picture.stem)}" src="data:image/png;base64,{data}"></p>'
    if len(results) == 2 and len(results[0]["runs"]) == len(results[1]["runs"]):
        yield f"<h2>Compared</h2><pre>{escape(compare(*results))}</pre>"
    for result in results:
        yield f"<h2>{escape(result['label'])}</h2><section>"
        for run in result["runs"]:
            yield f"<div><h3>{escape(point_name(run))}</h3><pre>{escape(block(run))}</pre></div>"
        about = json.dumps({name: result[name] for name in ABOUT}, indent=1)
        yield f"</section><details><summary>How it was made</summary><pre>{escape(about)}</pre></details>"
