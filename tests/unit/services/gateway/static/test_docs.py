"""The page at /docs shows every operation of the API, with any body of its request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.page_modules import run

from services.gateway.app import DOCUMENT

SCRIPT = """
const parts = new Map(["key", "version", "operations"].map((id) => [id, document.createElement("div")]));
document.getElementById = (id) => parts.get(id);
globalThis.sessionStorage = { getItem: () => null };
globalThis.fetch = async () => new Response(JSON.stringify(DESCRIBED));
await import("./docs.js");
const shown = parts.get("operations");
while (!shown.childNodes.length) await new Promise((resolve) => setImmediate(resolve));
report(shown.tree[2]);
"""


def words(tree: Any) -> list[str]:
    return [tree] if isinstance(tree, str) else [word for child in tree[2] for word in words(child)]


def test_every_operation_is_shown(tmp_path: Path) -> None:
    described = DOCUMENT
    shown = run(tmp_path, f"const DESCRIBED = {json.dumps(described)};\n{SCRIPT}")
    expected = {
        f"{method.upper()} {path}"
        for path, methods in described["paths"].items()
        for method in methods
        if method in ("get", "post", "delete")
    }
    assert {words(operation)[0] for operation in shown} == expected
    (upload,) = (each for each in shown if words(each)[0] == "POST /v1/files")
    assert "purpose (required)" in words(upload)
    assert "form" not in {child[0] for child in upload[2]}, "a file is not sent from here"
