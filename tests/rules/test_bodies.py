"""One wire: each subject is declared with its bodies, and JSON is read in one place."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from support.source_tree import Source, product

from shared import aliases, api, bodies, codec, messages
from shared.nats import subjects
from shared.nats.access import PUBLIC
from shared.nats.subjects import Subject
from shared.openai import batch_lines
from shared.telemetry import counters

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "subjects.md"
READ = {"json.loads", "json.load", "from_json"}
READ_MODELS = ("validate_json", "load_json")
WRITTEN = ("publish", "request", "create", "replace", "send")
JSON_ELSEWHERE = (
    "shared/bodies.py", "shared/api.py", "shared/telemetry/counters.py",  # codecs of bodies
    "services/gateway/",  # the HTTP dialects
    "shared/vocab/", "services/executor/checkpoint/", "services/executor/encoder/",  # files of models
    "shared/answer_formats/", "services/tokenizer/chat_template.py", "services/tokenizer/template_probe.py",
    "services/tokenizer/structured_output.py", "services/executor/sampling/logits_processors.py",  # by models
    "shared/nats/jetstream.py", "services/launcher/nats_server.py",  # of the nats-server
    "services/launcher/fork_server.py", "services/launcher/credentials.py", "services/launcher/session.py",
    "services/executor/cpu/autotune.py",
    "services/launcher/commands/chat.py", "services/launcher/commands/submit.py",  # files of a user
)  # fmt: skip
MODULES = (bodies, api, messages, codec, counters, aliases, batch_lines)  # of the types that subjects carry
WITHOUT_A_NAME = ("PUBLIC", "STORE", "MODELS", "HEARTBEAT_REQUEST_ALL_FLEETS")  # or shorter by one
PARTS_OF_OTHERS = {"work_of", "hooks_of", "file_part_any_tenant", "mailbox_all", "heartbeat_all", "gone_all"}


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


def declared() -> dict[str, Subject]:
    """The subjects by their names, with those that are constants."""
    return {name: each for name, each in vars(subjects).items() if isinstance(each, Subject)}


def carried() -> list[tuple[Subject, str, str]]:
    """Subject, verb, and what it carries."""
    rows: list[tuple[Subject, str, str]] = []
    for each in declared().values():
        verbs = {"": each.carries} if isinstance(each.carries, str) else each.carries
        rows += [(each, verb, text) for verb, text in verbs.items() if text]
    return rows


def test_subjects_declare_what_they_carry() -> None:
    assert {name for name, each in declared().items() if not each.carries} == PARTS_OF_OTHERS
    assert {name for name, each in vars(subjects).items() if inspect.isfunction(each)} == {
        "token", "untoken", "is_batch_job", "trace_body", "asked_trace", "name_at", "names_in", "wrong_name",
        "is_inbox", "_write", "_any",
    }  # fmt: skip


def test_patterns_match_declared_subjects() -> None:
    stems = [each.form.partition("%s")[0] for each in declared().values()]
    for name, value in vars(subjects).items():
        if name.isupper() and isinstance(value, str) and "." in value and name not in WITHOUT_A_NAME:
            stem = re.split(r"[*>]", value)[0]
            assert any(stem.startswith(each) or each.startswith(stem) for each in stems), name


@pytest.mark.parametrize("text", sorted({text for _, _, text in carried()}))
def test_bodies_of_subjects_are_declared(text: str) -> None:
    for name in re.split(r" -> | \| ", text):
        found = [module for module in MODULES if hasattr(module, name)]
        assert found or name in ("bytes", "text", "empty"), name


def test_batches_have_the_endpoints_of_their_lines() -> None:
    assert {*bodies.BatchCreated.__annotations__} >= {"endpoint", "completion_window"}
    for url in batch_lines.URLS:
        body = bodies.encode({"input_file_id": "f", "endpoint": url, "completion_window": "24h"})
        assert bodies.asked(bodies.BatchCreated, body)["endpoint"] == url


def page() -> str:
    """docs/reference/subjects.md."""
    rows = []
    for each, verb, text in carried():
        verbs = {"verb!": verb, "part!": verb or "N"}
        given = {name: verbs.get(name, name.rstrip("?!").upper()) for name in each.names}
        body, _, answer = text.partition(" -> ")
        shown = [", ".join(f"`{part}`" for part in side.split(" | ") if part) for side in (body, answer)]
        rows.append(f"| `{each.form % tuple(given.values())}` | {shown[0]} | {shown[1]} | {each.about} |")
    allowed = [
        f"| `{each[0]}` | {', '.join(each[1].split())} | {', '.join(each[2].split())} |" for each in PUBLIC
    ]
    return (
        "# Subjects\n\nEvery NATS subject with its body and answer, from `shared/nats/subjects.py`; "
        "`shared/bodies.py` has the types.\n`headrace.v1` is public; the [API](api.md) has its fields.\n\n"
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
    for each, verb, _ in carried():
        subject = each.form % tuple(verb or "x" for _ in each.names)
        if subject.startswith(f"{subjects.PUBLIC}."):
            (row,) = [row for row in patterns if row.fullmatch(subject.removeprefix(f"{subjects.PUBLIC}."))]
            patterns[row] += 1
    without = {row.pattern for row, count in patterns.items() if not count}
    assert without == {"models"}  # a constant, without a tenant


def test_the_page_lists_the_table() -> None:
    assert PAGE.read_text() == page()
