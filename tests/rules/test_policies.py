"""No name of a policy is compared outside the policies: what goes with one is a trait of its function."""

from __future__ import annotations

import ast

from support.source_tree import product

from services.scheduler.state.policies import KINDS, MOVED

NAMES = {name for names, _ in KINDS.values() for name in names} | {n for of in MOVED.values() for n in of}


def test_no_policy_name_is_compared_outside_policies() -> None:
    found = [
        f"{source.name}:{ast.unparse(node)}"
        for source in product()
        if source.room == "services/scheduler" and source.path.name != "policies.py"
        for node in source.nodes
        if isinstance(node, ast.Compare | ast.match_case) and _named(node) & NAMES
    ]
    assert found == []


def _named(node: ast.Compare | ast.match_case) -> set[str]:
    """The texts and functions that are compared."""
    inner = node.pattern if isinstance(node, ast.match_case) else node
    texts = {str(n.value) for n in ast.walk(inner) if isinstance(n, ast.Constant)}
    identity = isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
    return texts | ({n.id for n in ast.walk(node) if isinstance(n, ast.Name)} if identity else set())
