"""Checks the custom resources of the manifests against their definitions, which other projects publish:

    python scripts/check_custom_resources.py CRD.yaml...  > deploy/kubernetes/custom_resources.txt

An unknown field is an error, as for `kubernetes-validate --strict`, which has the built-in kinds. The figures
are the first digits of the SHA-256 of a resource and of its definition.
"""

from __future__ import annotations

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator

Body = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
OVERLAYS = ROOT / "deploy" / "kubernetes" / "overlays"


def closed(schema: Any) -> Any:
    """The schema without room for unknown fields."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: closed(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    return schema


def schemas(paths: list[str]) -> dict[tuple[str, str], tuple[Body, str]]:
    """By apiVersion and kind: the schema of a resource, and the file that it is from."""
    found = {}
    for path in map(Path, paths):
        data = path.read_bytes()
        for crd in filter(None, yaml.safe_load_all(data)):
            spec = crd["spec"]
            for version in spec["versions"]:
                schema = closed(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                source = f"{path.name}, {sha256(data).hexdigest()[:16]}"
                found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema, source
    return found


def digest(resource: Body) -> str:
    """What tells this resource from a changed one."""
    return sha256(json.dumps(resource, sort_keys=True).encode()).hexdigest()[:16]


def main(paths: list[str]) -> int:
    known, failed = schemas(paths), 0
    for overlay in sorted(OVERLAYS.iterdir()):
        rendered = subprocess.run(["kubectl", "kustomize", overlay], capture_output=True, check=True).stdout
        for resource in yaml.safe_load_all(rendered):
            kind = resource["apiVersion"], resource["kind"]
            if "." not in kind[0].partition("/")[0] or kind[0].partition("/")[0].endswith(".k8s.io"):
                continue  # built in
            name = f"{overlay.name}: {kind[0]} {kind[1]} {resource['metadata']['name']}, {digest(resource)}"
            if kind not in known:
                print(f"{name}: no definition given")
                failed += 1
                continue
            schema, source = known[kind]
            errors = [f"{e.json_path}: {e.message}" for e in Draft7Validator(schema).iter_errors(resource)]
            print(f"{name}: {'; '.join(errors) or 'valid'} ({source})")
            failed += bool(errors)
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
