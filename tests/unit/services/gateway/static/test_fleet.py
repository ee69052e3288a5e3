"""The page's line of a session: red where its next turn will compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.page_modules import run

IDLE: dict[str, Any] = {"session": "ab" * 14 + "a41f", "state": "idle", "tokens": 41_216, "idle_s": 1.2}


@pytest.mark.parametrize(
    ("more", "cells", "name"),
    [
        ({"tool": "shell"}, ["…a41f (shell)", "idle", "1.20 s", "41,216", ""], ""),
        (
            {"state": "below", "load_s": 0.101, "compute_s": 1.19},
            ["…a41f", "below", "1.20 s", "41,216", "loaded 101 ms"],
            "",
        ),
        (
            {"state": "below", "load_s": 2.5, "compute_s": 1.19},
            ["…a41f", "below", "1.20 s", "41,216", "computed 1.19 s"],
            "bad",
        ),
        ({"compute_s": 0.5}, ["…a41f", "idle", "1.20 s", "41,216", "computed 500 ms"], "bad"),
    ],
)
def test_a_session_is_a_line_and_red_where_its_next_turn_computes(
    tmp_path: Path, more: dict[str, Any], cells: list[str], name: str
) -> None:
    script = f"""
    import {{ make }} from "./dom.js";
    import {{ drawSession }} from "./fleet.js";
    const line = {{ cells: [], insertCell() {{ this.cells.push(make("td")); return this.cells.at(-1); }} }};
    drawSession(line, {json.dumps(IDLE | more)});
    report([line.cells.map((cell) => cell.textContent), line.className]);
    """
    assert run(tmp_path, script) == [cells, name]
