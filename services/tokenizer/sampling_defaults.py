"""`sampling_defaults` reads what the authors of a model state for requests that leave a field out.

A folder states it in generation_config.json, under the keys that vLLM reads, too; a GGUF file in keys of
llama.cpp's converter; the catalogue for a file that states nothing. A key with null counts as absent, other
keys are not read. A value that no request may have is an error at the start, never another value.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from shared.api import SamplingFields, whole_numbers
from shared.errors import SetupError
from shared.vocab.files import CATALOGUE, ModelFiles, json_object
from shared.vocab.gguf import read_metadata

log = logging.getLogger("headrace.tokenizer")

NOTHING = "temperature 1, as nothing is stated"
_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample", "max_new_tokens")
_PREFIX = "general.sampling."
_OF_GGUF = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}  # to _KEYS


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """`fields`: values of a request's fields, by name. `max_tokens` of a chat; 0: what the context has room
    for."""

    fields: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int = 0

    def __str__(self) -> str:
        longest = {"max_tokens": self.max_tokens} if self.max_tokens else {}
        return ", ".join(f"{name} {value:g}" for name, value in {**self.fields, **longest}.items()) or NOTHING


class _Stated(SamplingFields):
    """The bounds are those of a request."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    _whole = whole_numbers()

    do_sample: bool = True
    max_new_tokens: int = Field(0, ge=1)


def sampling_defaults(files: ModelFiles) -> SamplingDefaults:
    """The defaults of a model. Raises SetupError with the file and the key of a wrong value."""
    where = files.path if files.is_gguf else files.path / "generation_config.json"
    given = _in_gguf(where) if files.is_gguf else json_object(where)
    stated = {key: given[key] for key in _KEYS if given.get(key) is not None}
    if not stated:
        known = (entry.sampling for entry in CATALOGUE.values() if entry.file == files.path.name)
        return SamplingDefaults(dict(next(known, ())))
    try:
        read = _Stated.model_validate(stated)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        raise SetupError(
            f"{where}: `{key}` is {stated[key]!r:.40}: {first['msg']}; correct the file, or ignore what it "
            "states with --generation-config none"
        ) from None
    values = {name: getattr(read, name) for name in SamplingFields.model_fields if name in stated}
    if not read.do_sample:  # transformers is greedy then, for any temperature
        values["temperature"] = 0.0
    found = SamplingDefaults(values, read.max_new_tokens)
    log.info("a request that names no sampling gets %s, as %s states", found, where)
    return found


def _in_gguf(path: Path) -> dict[str, Any]:
    """The keys of a GGUF file, by their names in generation_config.json."""
    metadata = read_metadata(path)
    given = {key.removeprefix(_PREFIX): v for key, v in metadata.items() if key.startswith(_PREFIX)}
    if unread := sorted(given.keys() - _OF_GGUF.keys()):
        log.warning("%s: not followed: %s", path, ", ".join(_PREFIX + key for key in unread))
    return {name: given[key] for key, name in _OF_GGUF.items() if key in given}
