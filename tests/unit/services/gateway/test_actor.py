"""What a gateway needs before it starts."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from services.gateway.actor import MAX_FILES, build
from shared.config import Settings
from shared.errors import SetupError

LOGIN = "nats://headrace-gateway:secret@nats:4222"


def test_it_may_have_as_many_connections_as_the_machine_lets_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
        build(Settings())
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, MAX_FILES) > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_gateway_that_may_ask_in_every_name_wants_keys(tmp_path: Path) -> None:
    with pytest.raises(
        SetupError, match=r"as headrace-gateway .* `http_keys` is empty: set it to the file"
    ) as refused:
        build(Settings(nats_url=LOGIN))
    assert "secret" not in refused.value.message
    keys = tmp_path / "keys"
    keys.write_text("acme one\n")
    build(Settings(nats_url=LOGIN, http_keys=str(keys)))
    build(Settings(nats_url="nats://nats:4222"))
    with pytest.raises(SetupError, match="`http` is off"):
        build(Settings(http="off"))
