"""Which classes a tenant may use: the file, and what becomes of a request."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.text_models import served

from services.tokenizer.actor import TenantClasses, read_classes
from services.tokenizer.prepare import Submission, prepared
from shared.errors import Forbidden, HeadraceError, SetupError
from shared.messages import Tokenized
from shared.nats.access import CLASSES, DEFAULT_CLASSES


def test_class_file_names_the_classes_of_tenants() -> None:
    text = "acme interactive,batch\n\n# all of us\na=2Eb standard # less\n"
    assert read_classes(text) == {"acme": ("interactive", "batch"), "a.b": ("standard",)}
    for wrong in ("acme", "acme fast", "acme standard batch"):
        with pytest.raises(ValueError, match=r"line 1: `tenant class,\.\.\.` is expected"):
            read_classes(wrong)


def test_class_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "classes"
    path.write_text("acme interactive\n")
    classes = TenantClasses(str(path))
    assert (classes.classes_of("acme"), classes.classes_of("bob")) == (("interactive",), DEFAULT_CLASSES)
    path.write_text("acme wrong\n")
    os.utime(path, ns=(1, 1))
    classes.refresh()
    assert classes.classes_of("acme") == ("interactive",)
    path.write_text("acme batch\n")
    classes.refresh()
    assert classes.classes_of("acme") == ("batch",)
    assert TenantClasses().classes_of("anybody") == CLASSES
    with pytest.raises(SetupError, match="tenant_classes"):
        TenantClasses(str(tmp_path / "none"))


def outcome(tmp_path: Path, classes: tuple[str, ...], **more: Any) -> Tokenized | HeadraceError:
    body = json.dumps({"prompt": "a", **more}).encode()
    asked = Submission("acme", "inbox", body, "fresh", 7, 1, "", classes=classes)
    return prepared(asked, served(tmp_path)).outcome


def test_a_class_that_the_credentials_do_not_name_is_forbidden(tmp_path: Path) -> None:
    refused = outcome(tmp_path, DEFAULT_CLASSES, slo_class="interactive")
    assert isinstance(refused, Forbidden)
    assert (refused.code, refused.param) == (403, "slo_class")
    assert "do not allow 'interactive', only standard, batch" in refused.message


@pytest.mark.parametrize(
    ("classes", "found"),
    [(CLASSES, "standard"), (("batch",), "batch"), (("batch", "interactive"), "interactive")],
)
def test_request_without_a_class_gets_a_permitted_one(
    tmp_path: Path, classes: tuple[str, ...], found: str
) -> None:
    made = outcome(tmp_path, classes)
    assert isinstance(made, Tokenized)
    assert made.slo_class == found
