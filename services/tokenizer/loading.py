"""Loads what a tokenizer serves: a model's vocabulary, its chat template, and what its files state for fields
that a request leaves out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from services.tokenizer.chat_template import NOT_READ, UNKNOWN, ChatTemplate
from services.tokenizer.prepare import SamplingDefaults, ServedModel
from shared import api, errors
from shared.answer_formats.formats import AUTO, OFF, Format, named
from shared.config import Settings
from shared.processes import processor_targets
from shared.vocab.files import CATALOGUE, ModelFiles, json_object, read_metadata, resolve, served_names
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

log = logging.getLogger("headrace.tokenizer")

_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample", "max_new_tokens")
_PREFIX = "general.sampling."
_OF_GGUF = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}  # to _KEYS


class _Stated(api.SamplingFields):
    """The bounds are those of a request."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    _whole = api.whole_numbers()

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
        raise errors.SetupError(
            f"{where}: `{key}` is {stated[key]!r:.40}: {first['msg']}; correct the file, or ignore what it "
            "states with --generation-config none"
        ) from None
    values = {name: getattr(read, name) for name in api.SamplingFields.model_fields if name in stated}
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


def load_model(settings: Settings) -> ServedModel:
    """The vocabulary and template of the configured model, warmed up. Raises SetupError if the model is
    missing or of an unknown family."""
    files = resolve(settings.model, settings.cache_dir)
    vocabulary = load_vocabulary(files)
    defaults = sampling_defaults(files) if settings.generation_config == "auto" else SamplingDefaults()
    for special in (False, True):  # build both forms now: see Vocabulary.encode
        vocabulary.encode("warm up", special=special)
    name, *aliases = served_names(settings)
    template, form = _template_of(name, vocabulary, settings.answer_format)
    return ServedModel(
        name=name,
        aliases=tuple(aliases),
        vocabulary=vocabulary,
        template=template,
        max_context=settings.max_context or vocabulary.context_tokens,
        default_timeout_us=int(settings.request_timeout_s * 1e6),
        processors=tuple(processor_targets(settings.logits_processors)),
        trusts_templates=settings.trust_request_chat_template,
        answer_format=form,
        defaults=defaults,
    )


def _template_of(
    model: str, vocabulary: Vocabulary, answer_format: str
) -> tuple[ChatTemplate, Format | None]:
    """The chat template, probed, and the format of the answers. Logs if calls of functions cannot be read."""
    form = None if answer_format == AUTO else named(answer_format)
    template = ChatTemplate(vocabulary, form)
    template.skills(with_tools=False)
    skills = template.skills(with_tools=True)
    if answer_format == OFF:
        return template, None
    if skills.calls_are in (NOT_READ, UNKNOWN) and vocabulary.chat_template:
        log.warning(
            "%s: calls of functions in the form of its chat template are %s and may stay in the text "
            "(docs/design/answer_formats.md); the setting answer_format names another form",
            model, skills.calls_are,
        )  # fmt: skip
    return template, skills.form
