"""Prints the network policies of the manifests: which pod may connect to which, from the permissions.

    python scripts/network_policies.py > deploy/kubernetes/base/network_policies.yaml

Services talk over NATS alone, and may use it if they have a login there. What they may do with it the
nats-server knows, by the same permissions.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shared.nats.permissions import SERVICES, of_service

Body = dict[str, Any]
COMPONENT = "app.kubernetes.io/component"
# Pods of tenants and of the operator, in any namespace. To `matchLabels` Kustomize adds the label of ours.
CLIENT = {"matchExpressions": [{"key": "headrace-client", "operator": "In", "values": ["true"]}]}
IN_POD_OF = {"kv_offload": "executor"}  # services without a pod of their own
NATS, ROUTES, HTTP, DNS, HTTPS = 4222, 6222, 8000, 53, 443
HEAD = "# Made by scripts/network_policies.py from shared/nats/permissions.py: change those.\n"


def policies() -> list[Body]:
    """The policies, as YAML documents."""
    pods = [IN_POD_OF.get(kind, kind) for kind in SERVICES if of_service(kind, "default").publish]
    services = _pods(*dict.fromkeys(pods))
    nats, gateway, model = _pods("nats"), _pods("gateway"), _pods("model")
    clients = {"namespaceSelector": {}, "podSelector": CLIENT}
    dns = {"ports": [_port(DNS, "UDP"), _port(DNS)]}
    peers = [{"podSelector": services}, clients]
    return [
        _policy("deny-all", {"matchLabels": {"app.kubernetes.io/name": "headrace"}}, [], [dns]),
        _policy("services", services, None, [{"to": [{"podSelector": nats}], "ports": [_port(NATS)]}]),
        _policy(
            "nats",
            nats,
            [
                {"from": peers, "ports": [_port(NATS)]},
                {"from": [{"podSelector": nats}], "ports": [_port(ROUTES)]},
            ],
            [{"to": [{"podSelector": nats}], "ports": [_port(ROUTES)]}],
        ),
        _policy("gateway", gateway, [{"ports": [_port(HTTP)]}], None),
        _policy("model", model, None, [{"ports": [_port(HTTPS)]}]),
    ]


def text() -> str:
    """The file."""
    return HEAD + yaml.dump_all(policies(), Dumper=_Plain, sort_keys=False)


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _pods(*components: str) -> Body:
    return {"matchExpressions": [{"key": COMPONENT, "operator": "In", "values": [*components]}]}


def _port(port: int, protocol: str = "TCP") -> Body:
    return {"protocol": protocol, "port": port}


def _policy(name: str, pods: Body, ingress: list[Body] | None, egress: list[Body] | None) -> Body:
    """None: this policy says nothing about the direction."""
    rules = {"Ingress": ingress, "Egress": egress}
    spec: Body = {
        "podSelector": pods,
        "policyTypes": [way for way, allowed in rules.items() if allowed is not None],
    }
    spec |= {way.lower(): allowed for way, allowed in rules.items() if allowed}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": spec,
    }


if __name__ == "__main__":
    sys.stdout.write(text())
