"""One wire: each subject has its bodies in one table, and JSON is read in one place."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
from support.source_tree import Source, product

from shared import bodies
from shared.nats import subjects
from shared.nats.access import PUBLIC
from shared.openai.batch_lines import URLS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "subjects.md"
READ = {"json.loads", "json.load", "from_json"}
READ_MODELS = ("validate_json", "load_json")
WRITTEN = ("publish", "request", "create", "replace", "send")
JSON_ELSEWHERE = (
    "shared/bodies.py", "shared/api.py", "shared/telemetry/readings.py",  # codecs of bodies
    "services/gateway/",  # the HTTP dialects
    "shared/vocab/", "services/executor/checkpoint/", "services/executor/encoder/",  # files of models
    "shared/answer_formats/", "services/tokenizer/chat_template.py", "services/tokenizer/template_probe.py",
    "services/tokenizer/structured_output.py", "services/executor/sampling/logits_processors.py",  # by models
    "shared/nats/jetstream.py", "services/launcher/nats_server.py",  # of the nats-server
    "services/launcher/fork_server.py", "services/launcher/credentials.py", "services/launcher/session.py",
    "services/executor/cpu/autotune.py",
    "services/launcher/commands/chat.py", "services/launcher/commands/submit.py",  # files of a user
)  # fmt: skip
NOT_OURS = {  # functions and patterns that name no subject of their own
    "token", "untoken", "name_at", "names_in", "wrong_name", "is_inbox", "is_batch_job", "trace_body",
    "asked_trace", "work_of", "hooks_of", "file_part_any_tenant", "mailbox_all", "heartbeat_all", "gone_all",
}  # fmt: skip


def product_only() -> list[Source]:
    return [each for each in product() if not each.name.startswith(("tests/", "loadtest/", "scripts/"))]


@pytest.mark.parametrize("source", product_only(), ids=lambda s: s.name)
def test_json_is_read_by_the_codec_alone(source: Source) -> None:
    calls = [node for node in source.nodes if isinstance(node, ast.Call)]
    names = {ast.unparse(call.func) for call in calls}
    if not source.name.startswith(JSON_ELSEWHERE):
        assert not [name for name in names if name in READ or name.endswith(READ_MODELS)]
    for call in calls:
        if ast.unparse(call.func).rpartition(".")[2] in WRITTEN:
            assert "json.dumps({" not in ast.unparse(call)


def functions() -> list[str]:
    found = inspect.getmembers(subjects, inspect.isfunction)
    return [name for name, _ in found if not name.startswith("_") and not name.endswith("_any_tenant")]


def test_every_subject_is_in_the_table() -> None:
    listed = {name.partition(" ")[0] for name in bodies.SUBJECTS}
    assert {*functions()} - NOT_OURS == listed - {"status", "aliases"}  # constants without a function
    verbs = {name for name in bodies.SUBJECTS if " " in name}
    assert {name.partition(" ")[0] for name in verbs} == {
        "files",
        "batches",
        "file_part",
        "batch_part",
        "forward",
    }


def test_every_pattern_is_of_a_subject_in_the_table() -> None:
    made = {name.partition(" ")[0] for name in bodies.SUBJECTS}
    for name, value in vars(subjects).items():
        if name.isupper() and isinstance(value, str) and "." in value and name not in ("PUBLIC", "STORE"):
            word = name.removesuffix("_ALL").removesuffix("_ANY_TENANT").removesuffix("_ALL_FLEETS").lower()
            parts = {"file": "file_part", "line": "batch_line", "tokenizer_heartbeats": "heartbeat"}
            assert parts.get(word, word) in made, name


@pytest.mark.parametrize("name", sorted({part for row in bodies.SUBJECTS.values() for part in row}))
def test_a_body_is_declared(name: str) -> None:
    for part in filter(None, name.split(", ")):
        if part not in ("bytes", "text", "empty"):
            assert resolve_name(part if ":" in part else f"shared.bodies:{part}") is not None


def test_batches_have_the_endpoints_of_their_lines() -> None:
    assert {*bodies.BatchCreated.__annotations__} >= {"endpoint", "completion_window"}
    for url in URLS:
        body = bodies.encode({"input_file_id": "f", "endpoint": url, "completion_window": "24h"})
        assert bodies.asked(bodies.BatchCreated, body)["endpoint"] == url


def page() -> str:
    """docs/reference/subjects.md."""
    rows = []
    for name, (body, answer) in bodies.SUBJECTS.items():
        word, _, verb = name.partition(" ")
        make = getattr(subjects, word, None)
        if make is None:
            subject, about = getattr(subjects, word.upper()), ""
        else:
            names = inspect.signature(make).parameters
            given = [
                {"part": verb or ("N" if word == "file_part" else "end"), "verb": verb}.get(
                    each, each.upper()
                )
                for each in names
            ]
            subject = make(*given).replace("=", "")
            about = (inspect.getdoc(make) or "").partition("\n\n")[0].replace("\n", " ")
        bodies_of = ", ".join(f"`{part.rpartition(':')[2]}`" for part in body.split(", "))
        replies = ", ".join(f"`{part.rpartition(':')[2]}`" for part in answer.split(", ") if part)
        rows.append(f"| `{subject}` | {bodies_of} | {replies} | {about} |")
    allowed = [
        f"| `{each[0]}` | {', '.join(each[1].split())} | {', '.join(each[2].split())} |" for each in PUBLIC
    ]
    return (
        "# Subjects\n\nEvery NATS subject with its body and answer, from the table in `shared/bodies.py`, "
        "which has the types.\n`headrace.v1` is public; the [API](api.md) has its fields.\n\n"
        "| subject | body | answer | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n\n## Permissions\n\n"
        "The users of `headrace auth` send and read these below `headrace.v1`, from the table in "
        "`shared/nats/access.py`. T is a tenant.\n\n"
        "| subject | senders | receivers |\n|---|---|---|\n" + "\n".join(allowed) + "\n"
    )


def test_every_public_subject_has_its_senders_and_receivers() -> None:
    """One row of the permissions for each public subject, and no row without a subject."""
    patterns = {
        re.compile(each[0].replace(".", r"\.").replace("*", "[^.]+").replace("T", "[^.]+")): 0
        for each in PUBLIC
    }
    for name in bodies.SUBJECTS:
        word, _, verb = name.partition(" ")
        make = getattr(subjects, word, None)
        subject = (
            getattr(subjects, word.upper())
            if make is None
            else make(*[verb or "x"] * len(inspect.signature(make).parameters))
        )
        if subject.startswith(f"{subjects.PUBLIC}."):
            (row,) = [
                each for each in patterns if each.fullmatch(subject.removeprefix(f"{subjects.PUBLIC}."))
            ]
            patterns[row] += 1
    without = {each.pattern for each, count in patterns.items() if not count}
    assert without == {"models"}  # a constant, without a tenant


def test_the_page_lists_the_table() -> None:
    assert PAGE.read_text() == page()
