"""The rendered manifests: valid, hardened, and in agreement with what the code has."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from jsonschema import validators
from kubernetes_validate import SchemaNotFoundError, ValidationError
from support.kubernetes.manifests import FOLDER, OVERLAYS, Body, containers, one, pods, resources
from support.prometheus_process import program
from support.source_tree import ROOT

from services.launcher.serve import KINDS
from shared.config import PREFIX, Settings
from shared.nats.permissions import SERVICES

VERSION = kubernetes_validate.latest_version()
CUSTOM = {"ScaledObject", "ServiceMonitor"}
NATS, ROUTES, HTTP = 4222, 6222, 8000


def check(resource: Body) -> None:
    kubernetes_validate.validate(resource, VERSION, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_resource_is_valid(overlay: str) -> None:
    custom = set()
    for resource in resources(overlay):
        try:
            check(resource)
        except SchemaNotFoundError:
            custom.add(resource["kind"])
    assert custom == (CUSTOM if overlay == "keda" else set())


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d["spec"].update(replicas="two"),
        lambda d: d["spec"]["template"]["spec"]["containers"][0].update(readynessProbe={}),
    ],
)
def test_a_damaged_resource_is_not(damage: Callable[[Body], object]) -> None:
    deployment = one(resources("cpu"), "Deployment", "executor")
    damage(deployment)
    with pytest.raises(ValidationError):
        check(deployment)


def test_no_required_field_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each field that a schema requires of the resources is taken out, one at a time."""
    found: dict[tuple[str, str], Body] = {}  # (schema, field): an object that has the field

    def note(validator: object, fields: list[str], instance: Body, schema: Body) -> None:
        found.update({(schema["description"], name): instance for name in fields})

    noting = validators.extend(validators.Draft202012Validator, {"required": note})
    taken = set()
    for resource in (r for r in resources("keda") if r["kind"] not in CUSTOM):
        with monkeypatch.context() as patch:
            patch.setattr(validators, "Draft202012Validator", noting)
            check(resource)
        for field in found.keys() - taken:
            value = found[field].pop(field[1])
            with pytest.raises(ValidationError):
                check(resource)
            found[field][field[1]] = value
        taken |= found.keys()
    assert len(taken) > 20


def test_custom_resources_equal_the_checked_definitions() -> None:
    """After a change run scripts/check_custom_resources.py again, with the definitions."""
    checked = (FOLDER / "custom_resources.txt").read_text().splitlines()
    assert all(": valid (" in line for line in checked)
    now = {
        f"{overlay}: {r['apiVersion']} {r['kind']} {r['metadata']['name']}, "
        + sha256(json.dumps(r, sort_keys=True).encode()).hexdigest()[:16]
        for overlay in OVERLAYS
        for r in resources(overlay)
        if r["kind"] in CUSTOM
    }
    assert {line.partition(": valid")[0] for line in checked} == now


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_service_is_run_as_the_code_has_it(overlay: str) -> None:
    found = resources(overlay)
    (settings,) = [r for r in found if r["kind"] == "ConfigMap"]
    assert {r["metadata"]["name"] for r in found if r["kind"] == "PodDisruptionBudget"} == {*pods(found)} - {
        "model"
    }
    served = {}
    for component, template in pods(found).items():
        spec = template["spec"]
        assert spec["enableServiceLinks"] is spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        secrets = {v["name"]: v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}
        for container in containers(template):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            names = {e["name"] for e in container.get("env", [])}
            names |= {*settings["data"]} if "envFrom" in container else set()
            known = {PREFIX + name.upper() for name in Settings.model_fields} | {"HEADRACE_CONFIG"}
            assert {name for name in names if name.startswith(PREFIX)} <= known
            verb, *kind = container["args"]
            if verb != "serve":
                continue
            served[kind[0]] = component
            assert spec["shareProcessNamespace"] is True, "or `health` cannot kill process 1"
            for probe in ("startupProbe", "readinessProbe"):
                assert container[probe]["exec"]["command"] == ["headrace", "health", *kind]
            assert spec["terminationGracePeriodSeconds"] > float(settings["data"]["HEADRACE_DRAIN_TIMEOUT_S"])
            (auth,) = [m["name"] for m in container["volumeMounts"] if m["mountPath"] == "/auth"]
            assert secrets[auth] == f"headrace-{kind[0].replace('_', '-')}"
    assert served == {kind: "executor" if kind == "kv_offload" else kind for kind in KINDS}


def test_executor_and_kv_offload_share_a_pod_of_which_a_node_has_one() -> None:
    for overlay in OVERLAYS:
        spec = pods(resources(overlay))["executor"]["spec"]
        (rule,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert rule["topologyKey"] == "kubernetes.io/hostname"
        sidecar, executor = spec["initContainers"][0], spec["containers"][0]
        assert sidecar["restartPolicy"] == "Always"
        host, shm = {"name": "HEADRACE_HOST_ID"}, {"mountPath": "/dev/shm"}
        for container in (sidecar, executor):
            (name,) = [e for e in container["env"] if e["name"] == host["name"]]
            assert name["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
            (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == shm["mountPath"]]
            assert mount["name"] == "shm"


def test_the_images_are_targets_of_the_dockerfile() -> None:
    targets = {line.split()[-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if " AS " in line}
    images = {c["image"] for o in OVERLAYS for t in pods(resources(o)).values() for c in containers(t)}
    ours = {image.partition(":") for image in images if image.startswith("headrace/")}
    variants = [(name.removeprefix("headrace/"), tag.partition("-")[2]) for name, _, tag in ours]
    needed = {"-".join(filter(None, variant)) for variant in variants}
    assert needed == {"core", "kv", "executor-cpu", "executor-cuda"}
    assert needed <= targets


# ---- which service may connect to which --------------------------------------------------------------------


def test_network_policies_are_made_from_the_permissions() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "scripts" / "network_policies.py"], capture_output=True, text=True, check=True
    )
    assert made.stdout == (FOLDER / "base" / "network_policies.yaml").read_text()


def test_pods_connect_to_nats_and_to_nothing_else() -> None:
    found = resources("keda")
    policies = [r["spec"] for r in found if r["kind"] == "NetworkPolicy"]
    labels = {component: t["metadata"]["labels"] for component, t in pods(found).items()}
    labels |= {"client": {"headrace-client": "true"}, "stranger": {"app": "x"}}
    ports = (NATS, ROUTES, HTTP, 443, 8222, 9464)
    edges = {
        (source, target, port)
        for source in labels
        for target in labels
        for port in ports
        if allowed(policies, "Egress", labels[source], labels[target], port)
        and allowed(policies, "Ingress", labels[target], labels[source], port)
    }
    outside = {"client", "stranger"}
    inside = {
        (s, t, p) for s, t, p in edges if t not in outside and (s, t) not in {(s, "gateway") for s in outside}
    }
    logins = {"executor" if kind == "kv_offload" else kind for kind in SERVICES}
    assert inside == {*((kind, "nats", NATS) for kind in (*logins, "client")), ("nats", "nats", ROUTES)}
    assert {(s, p) for s, t, p in edges if t == "gateway"} == {(s, HTTP) for s in outside}
    assert {(s, p) for s, t, p in edges if t in outside and s not in outside} == {("model", 443)}


def allowed(policies: list[Body], way: str, pod: dict[str, str], other: dict[str, str], port: int) -> bool:
    """Whether the policies of a pod allow a connection; a pod that no policy selects may do anything."""
    own = [p for p in policies if way in p["policyTypes"] and selects(p["podSelector"], pod)]
    rules = [rule for p in own for rule in p.get(way.lower(), [])]
    side = "to" if way == "Egress" else "from"
    return not own or any(
        any(p["port"] == port and p["protocol"] == "TCP" for p in rule["ports"])
        and (side not in rule or any(selects(peer["podSelector"], other) for peer in rule[side]))
        for rule in rules
    )


def selects(selector: Body, labels: dict[str, str]) -> bool:
    exact = selector.get("matchLabels", {}).items() <= labels.items()
    assert all(e["operator"] == "In" for e in selector.get("matchExpressions", []))
    return exact and all(labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", []))


# ---- what KEDA asks Prometheus ------------------------------------------------------------------


def test_the_queries_of_the_triggers(tmp_path: Path) -> None:
    """Two gateways are scraped, and of two schedulers one stands by."""
    demand, durable = (
        t["metadata"]["query"] for t in one(resources("keda"), "ScaledObject", "executor")["spec"]["triggers"]
    )
    series = [
        {"series": f'{name}{{{labels},pod="gateway-{pod}"}}', "values": value}
        for pod in (1, 2)
        for name, labels, value in (
            ("headrace_scale_wanted", 'term="rows",model="m",instance="a"', "3"),
            ("headrace_scale_wanted", 'term="blocks",model="m",instance="a"', "5"),
            ("headrace_scale_wanted", 'term="rows",model="m",instance="b"', "0"),
            ("headrace_scale_wanted", 'term="blocks",model="m",instance="b"', "0"),
            ("headrace_keeper_queued", 'instance="k1"', "40"),
            ("headrace_keeper_queued", 'instance="k2"', "40"),
        )
    ]
    cases = [(demand, [{"value": 5}]), (durable, [{"value": 1}])]
    document = {
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [
                    {
                        "expr": f"{expr} >= 0",
                        "eval_time": "0m",
                        "exp_samples": [{"labels": "{}", **s} for s in samples],
                    }
                    for expr, samples in cases
                ],
            },
            {
                "interval": "1m",
                "input_series": [{"series": 'headrace_keeper_queued{instance="k1"}', "values": "0"}],
                "promql_expr_test": [
                    {"expr": durable, "eval_time": "0m", "exp_samples": [{"labels": "{}", "value": 0}]},
                    {"expr": demand, "eval_time": "0m", "exp_samples": []},
                ],
            },
        ],
    }
    (tmp_path / "queries.yml").write_text(yaml.safe_dump(document))
    done = subprocess.run(
        [program("promtool"), "test", "rules", "queries.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
