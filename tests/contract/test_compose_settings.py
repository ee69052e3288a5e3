"""compose.yaml and its overrides: settings of the shell reach the services, and viewers are profiles."""

from __future__ import annotations

import re
from typing import Any

import yaml
from support.source_tree import ROOT

from shared.config import PREFIX, Settings

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
KINDS = ("tokenizer", "scheduler", "executor", "kv_offload", "detokenizer", "gateway", "keeper")
# In the file of credentials, or the same for every container, or of one service alone.
MADE_HERE = {
    "nats_url",
    "cache_dir",
    "host_id",
    "http",
    "http_keys",
    "tenant_classes",
    "links",
    "l1",
    "l2",
    "executors",
}
OF_UP = {"port", "leaf", "durable", "gateways", "tokenizers", "detokenizers", "awake_gib", "keep_alive_s"}
VARIABLE = re.compile(r"\$\{?([A-Z][A-Z0-9_]*)")


def given(service: str) -> dict[str, Any]:
    return dict(SERVICES[service]["environment"])


def test_every_setting_of_the_shell_reaches_every_service() -> None:
    wanted = {PREFIX + name.upper() for name in Settings.model_fields.keys() - MADE_HERE - OF_UP}
    for kind in (*KINDS, "model", "cli", "loadtest"):
        environment = given(kind)
        assert wanted - environment.keys() == set(), kind
        for name in wanted:
            of_shell = environment[name] is None or VARIABLE.match(str(environment[name]))
            assert of_shell, f"{kind}: {name} is fixed"
            assert of_shell is True or of_shell[1] == name


def test_every_variable_of_a_service_is_a_setting() -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields} | {"HEADRACE_CONFIG"}
    for kind in (*KINDS, "model", "cli", "loadtest"):
        assert {n for n in given(kind) if n.startswith(PREFIX)} - known == set(), kind


def test_every_service_has_limits_that_are_settings() -> None:
    for kind in (*KINDS, "nats", "redis"):
        memory, cpus = SERVICES[kind]["mem_limit"], SERVICES[kind]["cpus"]
        of = kind.upper() if kind in ("executor", "kv_offload", "nats", "redis") else "SERVICE"
        assert (memory, cpus) == (f"${{{of}_MEMORY:-0}}", f"${{{of}_CPUS:-0}}")


def test_a_plain_start_needs_no_image_of_a_viewer() -> None:
    plain = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert plain == {"auth", "model", "nats", "redis", *KINDS}
    needed = {other for name in plain for other in SERVICES[name].get("depends_on", ())}
    assert needed <= plain
    assert "jaeger" not in str(COMPOSE["x-environment"])


def test_the_example_names_variables_that_compose_reads() -> None:
    example = (ROOT / ".env.example").read_text()
    named = set(re.findall(r"^#?([A-Z][A-Z0-9_]*)=", example, re.M))
    texts = [path.read_text() for path in (ROOT / "compose.yaml", *(ROOT / "docker").glob("*.yaml"))]
    read = {name for text in texts for name in VARIABLE.findall(text)}
    passed = {name for name, value in COMPOSE["x-environment"].items() if value is None}
    assert named - read - passed == {"COMPOSE_PROFILES", "COMPOSE_FILE"}
    assert {name for name in read if re.search("_(MEMORY|CPUS)$", name)} <= named


def test_compose_gives_every_client_of_nats_the_certificates_with_tls() -> None:
    over = yaml.safe_load((ROOT / "docker" / "tls.yaml").read_text())["services"]
    clients = {
        name
        for name, service in SERVICES.items()
        if "auth-" in str(service.get("volumes")) and name != "model"
    }
    assert over.keys() == clients
    assert [name for name in clients - {"auth"} if not over[name]["volumes"][0].endswith(":/tls:ro")] == []
    command = over["auth"]["command"]
    assert command[:2] == SERVICES["auth"]["command"][:2]
    assert command[command.index("--nats-url") + 1] == "tls://nats:4222?ca=/tls/ca.pem"


def test_logins_are_no_copy_of_a_folder_of_the_image() -> None:
    """Two containers that start at once would fill a new volume with it at the same time, where Docker 20.10
    refuses one of them: a folder exists."""
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", ())]
    logins = [mount for mount in mounts if str(mount).partition(":")[2].startswith("/auth:")]
    assert len(logins) >= 10
    assert [mount for mount in logins if not mount.endswith(":ro,nocopy")] == []
