"""The documentation names what exists: links, files, settings, commands, and the files of a checklist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.source_tree import PRODUCT, ROOT, product

from services.launcher.cli import _parser
from shared.api import ChatRequest, CompletionRequest
from shared.config import Settings, _to_text

DOCS = ROOT / "docs"
RESULTS = ROOT / "loadtest" / "results"
PAGES = [
    *DOCS.rglob("*.md"),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    RESULTS / "README.md",
]
NAMED = re.compile(r"`((?:services|shared|kernels|loadtest|tests|scripts|docker|docs)/[\w./-]+)`")
FILE = re.compile(r"`([\w/]+(?:\.py|/))`")
MOST_LINES = {"architecture.md": 150, "benchmarks.md": 200}
SAMPLING = DOCS / "guides" / "add_a_sampling_parameter.md"


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("|--"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            lost.append(link)
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_are_named_exist(page: Path) -> None:
    named = NAMED.findall(page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_pages_that_others_name_exist() -> None:
    """Code, the changelog, compose and its configuration."""
    others = [
        ROOT / "CHANGELOG.md",
        ROOT / "compose.yaml",
        *(ROOT / "docker").rglob("*.yml"),
        *(s.path for s in product()),
    ]
    named = {
        name for other in others for name in re.findall(r"(?<![\w/])docs/[\w/-]+\.md", other.read_text())
    }
    assert {name for name in named if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("name", MOST_LINES)
def test_pages_that_are_read_first_are_short(name: str) -> None:
    assert (DOCS / name).read_text().count("\n") <= MOST_LINES[name]


def test_the_map_has_every_module() -> None:
    sections = re.split(r"^### `([\w/]+)/`$", (DOCS / "architecture.md").read_text(), flags=re.MULTILINE)[1:]
    mapped: set[str] = set()
    for room, text in zip(sections[::2], sections[1::2], strict=True):
        for names, does in table(text.partition("\n## ")[0]):
            found = [ROOT / room / name for name in FILE.findall(names)]
            inside = [folder / name for folder in found if folder.is_dir() for name in FILE.findall(does)]
            assert [path for path in (*found, *inside) if not path.exists()] == []
            for path in found:
                files = path.rglob("*.py") if path.is_dir() else [path]
                mapped |= {str(file.relative_to(ROOT)) for file in files}
    modules = {s.name for s in product() if s.name.split("/")[0] in PRODUCT and not s.is_init}
    assert modules - mapped == set()


def test_a_sampling_parameter_is_in_the_files_of_its_guide() -> None:
    guide = SAMPLING.read_text()
    steps = guide.partition("Tests, in the order")[0]
    named = {name for name in NAMED.findall(steps) if name.split("/")[0] in PRODUCT}
    touched = {
        s.name for s in product() if s.name.split("/")[0] in PRODUCT and re.search(r"\bmin_p\b", s.text)
    }
    assert touched - named == set(), "files that the guide misses"
    count = re.search(r"Example: `min_p`. It touches (\d+) product files", guide)
    assert count is not None
    assert len(touched) == int(count[1])


def test_every_setting_is_described_with_its_default() -> None:
    rows = [cells for cells in table((DOCS / "reference" / "config.md").read_text()) if cells[0] != "setting"]
    described = {name.strip("`"): default.strip("`") for name, default, _ in rows}
    fields = Settings.model_fields
    assert described == {name: _to_text(field.default) for name, field in fields.items()}


def test_every_field_of_a_request_is_described() -> None:
    text = (DOCS / "reference" / "api.md").read_text().partition("\n## Fields\n")[2].partition("\n## ")[0]
    described = [name for first, *_ in table(text) for name in re.findall(r"`([a-z_]+)`", first)]
    fields = {"messages", "prompt", *ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert fields - set(described) == set()
    assert set(described) - fields <= {"none", "auto"}  # values that may be sent
    assert len(described) == len(set(described))


def test_every_command_is_described() -> None:
    (verbs,) = (a.choices for a in _parser("")._actions if isinstance(a.choices, dict))
    text = (DOCS / "reference" / "cli.md").read_text()
    assert {verb for verb in verbs if not re.search(rf"`headrace {verb}\b", text)} == set()


def test_raw_output_is_compressed_and_has_its_line() -> None:
    folders = {path.name for path in RESULTS.iterdir() if path.is_dir()}
    listed = {cells[0].strip("`") for cells in table((RESULTS / "README.md").read_text())} - {"folder"}
    assert listed == folders
    assert [path.name for path in RESULTS.rglob("*.json*") if path.suffix != ".gz"] == []
