"""`headrace auth`: private files, kept passwords, nothing overwritten unasked."""

from __future__ import annotations

import stat
import tomllib
from hashlib import sha256
from pathlib import Path

import bcrypt
import pytest

from services.gateway.visitors import read_keys
from services.launcher import credentials
from services.launcher.cli import main
from services.launcher.commands import auth
from services.launcher.commands.auth import Plan, Tls
from services.tokenizer.actor import read_classes
from shared.errors import SetupError
from shared.nats import access, permissions
from shared.nats.access import DEFAULT_CLASSES

URL = "nats://nats:4222"
USERS = ["tokenizer", "scheduler", "executor", "kv_offload", "detokenizer", "gateway", "keeper", "operator"]


def make(folder: Path, *tenants: str, force: bool = False, tls: Tls | None = None) -> list[str]:
    made: list[str] = []
    auth.generate(folder, Plan(URL, "default", tenants, force, tls), made.append)
    return made


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_each_user_has_a_folder_closed_to_others(tmp_path: Path) -> None:
    make(tmp_path / "a" / "auth", "acme")
    folder = tmp_path / "a" / "auth"
    expected = {f"{name}/headrace.toml" for name in USERS}
    expected |= {f"tenants/{t}/{name}" for t in ("acme", "public") for name in ("headrace.toml", "api_key")}
    expected |= {"operator/api_key", "nats/nats.conf", "nats/users.conf", "gateway/keys", "tokenizer/classes"}
    assert set(contents(folder)) == expected
    modes = {stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*") if p.is_file()}
    folders = {stat.S_IMODE(p.stat().st_mode) for p in (folder, *folder.rglob("*")) if p.is_dir()}
    assert (modes, folders) == ({0o600}, {0o700})


def test_server_listens_for_edges_once_requested(tmp_path: Path) -> None:
    make(tmp_path)
    conf, users = tmp_path / "nats" / "nats.conf", tmp_path / "nats" / "users.conf"
    assert "leafnodes" not in conf.read_text()
    assert "headrace-leaf" not in users.read_text()
    auth.generate(tmp_path, Plan(URL, "default", leaves=True, tls=Tls("c", "k")), print)
    secured = 'leafnodes { port: 7422, tls { cert_file: "c", key_file: "k" } }'
    assert secured in conf.read_text()
    url = credentials.url_of(tmp_path, "leaf", "nats-leaf://central:7422")
    assert access.parse(url).user == "headrace-leaf"
    make(tmp_path, "another")
    assert "leafnodes { port: 7422 }" in conf.read_text()
    assert "headrace-leaf" in users.read_text()
    assert credentials.url_of(tmp_path, "leaf", "nats-leaf://central:7422") == url


def test_servers_configuration_has_the_passwords_only_as_hashes(tmp_path: Path) -> None:
    make(tmp_path)
    users = (tmp_path / "nats" / "users.conf").read_text()
    for name in [*USERS, "public"]:
        url = credentials.url_of(tmp_path, name)
        password, user = access.password_of(url), access.parse(url).user
        assert len(password) == 43
        assert password not in users
        (line,) = [line for line in users.splitlines() if f'user: "{user}"' in line]
        assert bcrypt.checkpw(password.encode(), line.split('"')[3].encode())


def test_auth_again_changes_nothing(tmp_path: Path) -> None:
    make(tmp_path, "acme")
    before = contents(tmp_path)
    assert make(tmp_path) == []
    assert contents(tmp_path) == before


def test_a_new_tenant_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    make(tmp_path)
    before = contents(tmp_path)
    made = make(tmp_path, "a.b")
    assert [line.partition(": ")[0] for line in made] == [
        str(tmp_path / "tenants/a=2Eb/headrace.toml"), str(tmp_path / "nats/users.conf")
    ]  # fmt: skip
    after = contents(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {
        "nats/users.conf", "gateway/keys", "tokenizer/classes",
    }  # fmt: skip
    assert 'user: "a=2Eb"' in after["nats/users.conf"]


def test_gateways_configuration_has_each_tenant_by_the_hash_of_its_key(tmp_path: Path) -> None:
    make(tmp_path, "a.b", "in two words")
    keys = tmp_path / "gateway" / "keys"
    own = (tmp_path / "tenants/a=2Eb/api_key").read_text().strip()
    hashed = sha256(own.encode()).hexdigest()
    assert own.startswith("hr-")
    assert read_keys(keys.read_text())[hashed] == "a.b"
    users = ["a.b", "headrace-operator", "public"]  # the third tenant has no line
    assert sorted(read_keys(keys.read_text()).values()) == users
    keys.write_text("# mine\nelse hr-1\n" + keys.read_text())
    make(tmp_path)
    assert keys.read_text().startswith("# mine\nelse hr-1\n")
    assert sorted(read_keys(keys.read_text()).values()) == sorted([*users, "else"])


def test_classes_are_written_for_the_named_tenants(tmp_path: Path) -> None:
    classes = tmp_path / "tokenizer" / "classes"
    make(tmp_path, "a.b", "bob")
    assert read_classes(classes.read_text()) == dict.fromkeys(("a.b", "bob", "public"), DEFAULT_CLASSES)
    url = ["--nats-url", URL]
    assert main(["auth", str(tmp_path), *url, "--tenant", "a.b", "--classes", "interactive, standard"]) == 0
    make(tmp_path, "new")
    found = read_classes(classes.read_text())
    assert found["a.b"] == ("interactive", "standard")
    assert {found[name] for name in ("bob", "new", "public")} == {DEFAULT_CLASSES}
    assert main(["auth", str(tmp_path), *url, "--classes", "batch"]) == 0
    assert set(read_classes(classes.read_text()).values()) == {("batch",)}
    assert main(["auth", str(tmp_path), *url, "--classes", "fast"]) == 1


def test_accounts_stay_once_requested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "acme", "a.b")
    kept = tmp_path / "scheduler" / "headrace.toml"
    kept.write_text(kept.read_text() + 'policy = "routing=prefix"\n')
    before = {name: credentials.url_of(tmp_path, name) for name in ("tokenizer", "operator", "a.b")}
    users, limits = tmp_path / "nats" / "users.conf", tmp_path / "nats" / "accounts"
    assert (credentials.account_of(tmp_path), limits.exists()) == ("", False)
    url = ["auth", str(tmp_path), "--nats-url", URL]
    capsys.readouterr()
    assert main([*url, "--accounts"]) == 0
    assert "rename the folder `jetstream/$G`" in capsys.readouterr().out
    assert limits.read_text() == "a=2Eb\nacme\npublic\n"
    assert main([*url, "--tenant", "a.b", "--limits", "connections=9, payload=1KB,jetstream=1GB"]) == 0
    assert credentials.url_of(tmp_path, "tokenizer") == before["tokenizer"] + "?tenants=accounts"
    assert access.parse(credentials.url_of(tmp_path, "keeper", "tls://h:1?ca=f")).accounts
    assert {
        name: credentials.url_of(tmp_path, name) for name in ("operator", "a.b")
    }.items() <= before.items()
    assert kept.read_text().endswith('?tenants=accounts"\npolicy = "routing=prefix"\n')
    text = users.read_text()
    assert "authorization {" not in text
    assert '"service"' not in text, "such an import forgets its replies after a silence"
    assert text.count('limits: {"max_connections": 9, "max_payload": 1024}') == 1
    assert text.count('jetstream: {"max_mem": 0, "max_file": 1073741824}') == 1
    assert text.count("jetstream: disabled") == 2
    assert credentials.authorization(tmp_path, "default") == text
    assert credentials.account_of(tmp_path) == "headrace-services"
    first = contents(tmp_path)
    assert make(tmp_path) == []
    assert contents(tmp_path) == first
    make(tmp_path, "new")
    assert limits.read_text().splitlines()[1:] == ["acme", "new", "public"]
    assert main([*url, "--limits", "connections=1"]) == 0
    assert users.read_text().count('limits: {"max_connections": 1}') == 4


@pytest.mark.parametrize(
    "limits",
    [
        "connections",
        "connections=0",
        "rows=1",
        "payload=1TB",
        "payload=-1",
        "payload=1.5MB",
        "payload=2GB",
        "=1",
    ],
)
def test_a_wrong_limit_is_named_and_changes_nothing(tmp_path: Path, limits: str) -> None:
    with pytest.raises(SetupError, match=f"'{limits}' is no limit of an account"):
        auth.generate(tmp_path, Plan(URL, "default", accounts=True, limits=f"connections=5,{limits}"), print)
    assert contents(tmp_path) == {}


def test_force_makes_all_anew(tmp_path: Path) -> None:
    make(tmp_path)
    before = contents(tmp_path)
    make(tmp_path, force=True)
    after = contents(tmp_path)
    assert {name for name in before if before[name] == after[name]} == {
        "nats/nats.conf", "tokenizer/classes",
    }  # fmt: skip


def test_another_address_is_refused_and_shows_no_password(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(SetupError, match=r"is for nats://nats:4222, not for nats://other:1: .*--force"):
        auth.generate(tmp_path, Plan("nats://other:1", "default"), print)


def test_configuration_of_another_author_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "nats").mkdir()
    (tmp_path / "nats" / "nats.conf").write_text("port: 4222\n")
    with pytest.raises(SetupError, match=r"nats\.conf was not made by `headrace auth`"):
        make(tmp_path)
    assert contents(tmp_path) == {"nats/nats.conf": "port: 4222\n"}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "scheduler" / "headrace.toml").write_text("nats_url = ")
    with pytest.raises(SetupError, match=r"scheduler/headrace\.toml cannot be read"):
        make(tmp_path)


@pytest.mark.parametrize("name", ["headrace-tokenizer", "headrace-", ""])
def test_names_of_services_are_no_tenants(tmp_path: Path, name: str) -> None:
    with pytest.raises(SetupError, match="cannot be a tenant"):
        make(tmp_path, name)


def test_the_files_are_read_as_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["auth", str(tmp_path), "--nats-url", "nats://h:1"]) == 0
    capsys.readouterr()
    assert main(["auth", str(tmp_path), "--show", "public", "--nats-url", "nats://127.0.0.1:9"]) == 0
    shown = capsys.readouterr().out.strip()
    given = tomllib.loads((tmp_path / "tenants/public/headrace.toml").read_text())
    assert set(given) == {"nats_url"}
    assert shown == given["nats_url"].replace("@h:1", "@127.0.0.1:9")
    assert main(["auth", str(tmp_path), "--show", "absent"]) == 1
    assert "there are no credentials in" in capsys.readouterr().err


def test_tls_needs_both_files(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="--tls-cert and --tls-key"):
        auth.tls_of("cert.pem", "")
    make(tmp_path, tls=auth.tls_of("/c.pem", "/k.pem"))
    assert 'tls { cert_file: "/c.pem", key_file: "/k.pem" }' in (tmp_path / "nats/nats.conf").read_text()


def test_up_without_users_prints_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="run `headrace auth"):
        credentials.authorization(tmp_path, "default")


def test_users_of_another_version_or_fleet_are_an_error(tmp_path: Path) -> None:
    """Else the services would start, and then miss one subject or another."""
    make(tmp_path)
    users = tmp_path / "nats" / "users.conf"
    assert credentials.authorization(tmp_path, "default") == users.read_text()
    with pytest.raises(
        SetupError, match=r"users\.conf is for another version or fleet: run `headrace auth .* again"
    ):
        credentials.authorization(tmp_path, "other")
    users.write_text(users.read_text().replace(', "_INBOX.*.headrace-gateway.>"', ""))
    with pytest.raises(SetupError, match="for another version"):
        credentials.authorization(tmp_path, "default")
    make(tmp_path, "late")
    assert credentials.authorization(tmp_path, "default") == users.read_text()
    one, other = (
        '"hr.default.metrics"',
        '"headrace.v1.status"',
    )  # another version writes them in another order
    users.write_text(users.read_text().replace(one, "?").replace(other, one).replace("?", other))
    assert credentials.authorization(tmp_path, "default") == users.read_text()


def test_urls_are_parsed_and_shown() -> None:
    one = access.parse("tls://headrace-executor:pw@h:4222?ca=/ca.pem")
    assert one == access.Login(("tls://headrace-executor:pw@h:4222",), "headrace-executor", "/ca.pem")
    assert one.inbox_prefix == "_INBOX.headrace-executor"
    assert access.parse("nats://a:1, nats://b:2") == access.Login(("nats://a:1", "nats://b:2"))
    assert access.parse("nats://a:1").inbox_prefix == "_INBOX"
    assert access.shown("nats://u:p@a:1,nats://u:p@b:2") == "nats://a:1,nats://b:2"
    assert access.as_user("nats://x:y@a:1,tls://b:2?ca=f", "u", "p") == "nats://u:p@a:1,tls://u:p@b:2?ca=f"
    tenants = [access.tenant_of(f"nats://{u}h:1", "public") for u in ("", "headrace-operator:p@", "a=20b:p@")]
    assert tenants == ["public", "public", "a b"]
    with pytest.raises(SetupError, match="is not a tenant"):
        access.tenant_of("nats://a.b:p@h:1", "public")
    with pytest.raises(SetupError, match=r"no certificates in /nowhere\.pem"):
        access.Login((), ca="/nowhere.pem").tls()


def test_no_tenant_reaches_a_mailbox_or_another_tenant() -> None:
    allowed = permissions.of_tenant("acme")
    assert all(".acme." in f"{subject}." for subject in allowed.publish)
    assert {*allowed.subscribe} == {"_INBOX.acme.>", "headrace.v1.done.acme.*"}
    assert not allowed.answers
