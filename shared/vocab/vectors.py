"""The settings for the vector of a text, from the files of sentence-transformers in a model's folder.

    modules.json                        its modules in order: Transformer, Pooling, perhaps Normalize
    sentence_bert_config.json           of Transformer: how many tokens of a text count, lower case
    1_Pooling/config.json               of Pooling
    config_sentence_transformers.json   the text before each text (`default_prompt_name`)

A tokenizer cuts and changes texts by them, an executor pools by them. Read as sentence-transformers 6.2 reads
them; a key that it does not have, or that Headrace does not follow, is `refused` by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.vocab.files import VectorSettings, unreadable

_WHAT = "a configuration of sentence-transformers"
_MODE = "pooling_mode_"
_ROOTS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")  # the first is read
_FORWARD = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
_ANY = object()  # as a value: the key changes no vector
_FOLLOWED: Mapping[str, object] = {"max_seq_length": _ANY, "do_lower_case": _ANY}
# Keys with the one value at which they change nothing; null and an empty object do not, either.
_TRANSFORMER: Mapping[str, object] = {
    **_FOLLOWED,
    "transformer_task": "feature-extraction",
    "modality_config": _FORWARD,
    "module_output_name": "token_embeddings",
    "unpad_inputs": _ANY,
}
_ARGUMENTS = (
    "model_args",
    "model_kwargs",
    "tokenizer_args",
    "processor_kwargs",
    "config_args",
    "config_kwargs",
)
_ARGUMENT = dict.fromkeys(
    ("trust_remote_code", "torch_dtype", "dtype", "attn_implementation", "add_pooling_layer", "use_fast"),
    _ANY,
)
_POOLING = {"word_embedding_dimension": _ANY, "embedding_dimension": _ANY, "include_prompt": _ANY}
_WHOLE = {
    "__version__": _ANY, "prompts": _ANY, "default_prompt_name": _ANY, "similarity_fn_name": _ANY,
    "requirements": _ANY, "model_type": "SentenceTransformer",
}  # fmt: skip


def settings_in(folder: Path) -> VectorSettings:
    """The settings of a folder. Raises SetupError for a file that is damaged."""
    file = folder / "modules.json"
    try:
        modules = json.loads(file.read_text("utf-8"))
        if refused := _unknown_module(modules):
            return VectorSettings(refused=refused)
        pooling = _read(folder / str(modules[1]["path"]) / "config.json", needed=True) if modules[1:] else {}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise unreadable(file, _WHAT, error) from error
    roots = (folder / f"sentence_{root}_config.json" for root in _ROOTS)
    transformer = next(filter(None, map(_read, roots)), {})
    whole = _read(folder / "config_sentence_transformers.json")
    most, prompt = _most_tokens(folder, transformer), _prompt(whole)
    unknown = [*_unknown(transformer, pooling, whole), *_impossible(pooling, most, prompt)]
    return VectorSettings(
        pooling=_modes(pooling) if modules[1:] else (),
        most_tokens=most or 0,
        lower_case=bool(transformer.get("do_lower_case")),
        prompt=prompt or "",
        refused=min(unknown, default=""),
    )


def _unknown_module(modules: Sequence[Mapping[str, Any]]) -> str:
    """The first module that is not followed, or not in its place: empty if all are."""
    expected = ("Transformer", "Pooling", "Normalize")
    for i, module in enumerate(modules):
        library, _, kind = str(module["type"]).rpartition(".")
        if kind != expected[min(i, 2)] or library.partition(".")[0] != "sentence_transformers":
            return f"a module {module['type'] if kind in expected else kind}"
        if kind == "Transformer" and module["path"]:
            return f"path = {module['path']!r} of its Transformer"
        for key in module.keys() - {"idx", "name", "path", "type"}:
            if module[key]:
                return f"{key} = {module[key]!r:.60} in modules.json"
    return ""


def _unknown(*given: Mapping[str, Any]) -> Iterator[str]:
    """The keys of the three files that may change a vector, and are not followed."""
    transformer, pooling, whole = given
    flat = {key: value for key, value in transformer.items() if key not in _ARGUMENTS}
    modes = dict.fromkeys((key for key in pooling if key.startswith("pooling_mode")), _ANY)
    files = [
        ("sentence_bert_config.json", flat, _TRANSFORMER),
        ("1_Pooling/config.json", pooling, {**_POOLING, **modes}),
        ("config_sentence_transformers.json", whole, _WHOLE),
    ]
    files += [
        (f"{name} of sentence_bert_config.json", transformer.get(name) or {}, _ARGUMENT)
        for name in _ARGUMENTS
    ]
    for name, found, known in files:
        for key, value in found.items() if isinstance(found, dict) else [(name, found)]:
            wanted = known.get(key)
            if value not in (None, {}) and wanted is not _ANY and value != wanted:
                yield f"{key} = {value!r:.60} in {name}"


def _impossible(pooling: Mapping[str, Any], most: int | None, prompt: str | None) -> Iterator[str]:
    if most is None:
        yield "max_seq_length, which is no positive number"
    if prompt is None:
        yield "default_prompt_name, which names none of the prompts"
    if prompt and pooling.get("include_prompt") is False:
        yield "include_prompt = False beside a default_prompt_name"


def _modes(pooling: Mapping[str, Any]) -> tuple[str, ...]:
    if "pooling_mode" in pooling:
        mode = pooling["pooling_mode"]
        return tuple(map(str, mode)) if isinstance(mode, list) else (str(mode),)
    on = tuple(key.removeprefix(_MODE) for key, value in pooling.items() if key.startswith(_MODE) and value)
    return on or ("mean",)


def _prompt(whole: Mapping[str, Any]) -> str | None:
    """The text before each text; None if it has a name alone."""
    name, prompts = whole.get("default_prompt_name"), whole.get("prompts")
    found = prompts.get(name) if isinstance(prompts, dict) else None
    return "" if name is None else found if isinstance(found, str) else None


def _most_tokens(folder: Path, transformer: Mapping[str, Any]) -> int | None:
    """What `max_seq_length` states, else the tokenizer's and the model's limits together, 0 without any; None
    for what is no limit."""
    stated = transformer.get("max_seq_length")
    if stated is not None:
        return stated if type(stated) is int and stated > 0 else None
    limits = (
        _read(folder / "tokenizer_config.json").get("model_max_length"),
        _read(folder / "config.json").get("max_position_embeddings"),
    )
    return int(min((each for each in limits if isinstance(each, int | float) and each > 0), default=0))


def _read(file: Path, *, needed: bool = False) -> dict[str, Any]:
    if not needed and not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise unreadable(file, _WHAT, error) from error
