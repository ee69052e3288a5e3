"""The program that compares the templates of a folder with the table of what is expected of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.template_shapes import SHAPES

from loadtest import chat_templates


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, source in SHAPES.items():
        (tmp_path / f"{name}.jinja").write_text(source)
    return tmp_path


def test_no_shape_loses_a_word(folder: Path) -> None:
    assert {line.split("\t")[-1] for line in chat_templates.table(folder)} == {"none"}


def test_a_template_that_differs_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat_templates, "TABLE", folder / "table.tsv")
    assert chat_templates.main([str(folder), "--write"]) == 0
    assert chat_templates.main([str(folder)]) == 0
    changed = chat_templates.TABLE.read_text().replace("\thermes\tread back", "\thermes\tnot read back")
    chat_templates.TABLE.write_text(changed)
    assert chat_templates.main([str(folder)]) == 1
    assert f"{len(SHAPES)} templates, 1 differ" in capsys.readouterr().out


def test_file_without_a_template_is_named(folder: Path) -> None:
    assert chat_templates.outcome("{% if %}")[1] == "not jinja"
    assert chat_templates.outcome("{{ raise_exception('no') }}")[-1] == "all"


def test_the_table_has_the_real_templates() -> None:
    rows = [line.split("\t") for line in chat_templates.TABLE.read_text().splitlines()]
    assert tuple(rows[0]) == chat_templates.COLUMNS
    assert all(len(row) == len(chat_templates.COLUMNS) and len(row[0]) == 64 for row in rows[1:])
    assert {row[3] for row in rows[1:]} <= {"read back", "written by headrace", "not read back", "unknown"}
    assert [row[1] for row in rows[1:] if row[-1] == "all"] == [
        "fireworks-ai-llama-3-firefunction-v2", "hf-fireworks-ai-firefunction-v1",
    ]  # fmt: skip
