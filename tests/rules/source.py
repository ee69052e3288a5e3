"""The tree as the rules see it: every Python file of the product, parsed."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("shared", "services", "kernels", "loadtest")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    def functions(self) -> list[FunctionNode]:
        return [n for n in ast.walk(self.tree) if isinstance(n, FunctionNode)]

    def classes(self) -> list[ast.ClassDef]:
        return [n for n in ast.walk(self.tree) if isinstance(n, ast.ClassDef)]

    def imports(self) -> list[tuple[str, ast.stmt]]:
        """Every imported module, wherever the import stands."""
        found: list[tuple[str, ast.stmt]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(alias.name, node) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}: a relative import"
                found.append((node.module or "", node))
                found += [(f"{node.module}.{alias.name}", node) for alias in node.names]
        return found


@cache
def product() -> tuple[Source, ...]:
    """Every file of the product rooms."""
    paths = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    assert len(paths) > 60, "the rules look at an empty tree"
    return tuple(Source(p, p.read_text(), ast.parse(p.read_text())) for p in paths)


def length(node: ast.AST) -> int:
    """Lines of a definition, decorators and docstring included."""
    return (getattr(node, "end_lineno", 0) or 0) - getattr(node, "lineno", 0) + 1
