"""The configuration of a leaf node connection. What passes it: tests/contract/test_edge.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.launcher import leaf
from services.launcher.nats_server import ServerLimits
from services.launcher.up import Flags, served_models, up
from shared.config import Settings
from shared.errors import SetupError

URL = "nats-leaf://central.example:7422"


def test_the_models_of_an_edge_stay_there() -> None:
    block = leaf.remote(URL, ["a.b", "c"], has_users=False)
    for verb in ("generate", "tokenize", "detokenize"):
        for name in ("a=2Eb", "c"):
            assert block.count(f'"headrace.v1.{verb}.*.{name}"') == 2, "both directions"
    assert '"headrace.v1.files.>"' in block
    alone = leaf.remote(URL, [], has_users=False)
    assert "generate" not in alone
    assert "files" not in alone, "those of the centre"


def test_a_secured_centre_is_checked_with_a_file() -> None:
    servers = "tls://headrace-leaf:p@a.example:7422?ca=/etc/ca.pem,tls://headrace-leaf:p@b.example:7422"
    block = leaf.remote(servers, [], has_users=True)
    assert 'urls: ["tls://headrace-leaf:p@a.example:7422", "tls://headrace-leaf:p@b.example:7422"]\n' in block
    assert 'tls { ca_file: "/etc/ca.pem" }' in block
    assert "tls" not in leaf.remote(URL, [], has_users=False)


@pytest.mark.parametrize(
    "url", ["central:7422", "nats://central:7422", "nats-leaf://", "nats-leaf://h:99999"]
)
def test_a_url_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(SetupError, match="name the leaf port"):
        leaf.remote(url, [], has_users=False)


def test_a_centre_with_credentials_needs_an_edge_with_some() -> None:
    with pytest.raises(SetupError, match="headrace auth DIR") as refused:
        leaf.remote("nats-leaf://headrace-leaf:secret@central:7422", [], has_users=False)
    assert "secret" not in refused.value.message


@pytest.mark.parametrize("address", ["7422", ":7422", "0.0.0.0:", "0.0.0.0:0", "0.0.0.0:70000", "h:x"])
def test_an_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(SetupError, match="host:port"):
        leaf.listen(address, None)


def test_other_machines_need_credentials(tmp_path: Path) -> None:
    assert '"127.0.0.1:7422"' in leaf.listen("127.0.0.1:7422", None)
    with pytest.raises(SetupError, match="need credentials"):
        leaf.listen("0.0.0.0:7422", None)
    with pytest.raises(SetupError, match="no credentials for edges"):
        leaf.listen("0.0.0.0:7422", tmp_path)
    (tmp_path / "leaf").mkdir()
    assert '"0.0.0.0:7422"' in leaf.listen("0.0.0.0:7422", tmp_path)


def test_the_streams_of_an_edge_have_a_domain() -> None:
    with_streams = leaf.limits_of("f", ServerLimits(store="/x"))
    assert (with_streams.domain, with_streams.ping_interval) == ("edge-f", leaf.PING_INTERVAL)
    assert leaf.limits_of("f", None).domain == ""


def test_only_an_edge_may_have_no_model() -> None:
    assert served_models(Settings(leaf=URL, model="none")) == {}
    with pytest.raises(SetupError):
        served_models(Settings(model="none"))


@pytest.mark.parametrize(
    ("settings", "leaves"),
    [
        ({"leaf": URL, "nats_url": "nats://n:4222"}, ""),
        ({"nats_url": "nats://n:4222"}, "127.0.0.1:7422"),
        ({"leaf": URL}, "127.0.0.1:7422"),
    ],
)
def test_only_the_embedded_server_is_an_edge_or_has_some(settings: dict[str, str], leaves: str) -> None:
    with pytest.raises(SetupError, match="use one"):
        up(Settings(**settings), flags=Flags(leaves=leaves))
