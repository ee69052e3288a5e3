"""The wheel has all files of the page, with the licence of the library among them."""

from __future__ import annotations

import tomllib

from support.source_tree import ROOT

GATEWAY = ROOT / "services" / "gateway"


def test_the_wheel_has_every_file_of_the_page_and_the_licence_of_its_library() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["services.gateway"]
    shipped = {path for pattern in patterns for path in GATEWAY.glob(pattern) if path.is_file()}
    assert shipped == {path for path in (GATEWAY / "static").rglob("*") if path.is_file()}
    licence = "services/gateway/static/marked/LICENSE"
    assert ROOT / licence in shipped
    assert licence in project["project"]["license-files"]
    assert "Permission is hereby granted, free of charge" in (ROOT / licence).read_text()
