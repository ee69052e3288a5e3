"""The tree as the rules see it: every Python file of the product and of loadtest, parsed when a rule asks."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("headrace", "shared", "services", "kernels", "loadtest")
PRODUCT = ("headrace", "shared", "services", "kernels")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Parsed once, and not by each worker that only collects the tests."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the tree, walked once."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def functions(self) -> list[FunctionNode]:
        return [n for n in self.nodes if isinstance(n, FunctionNode)]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [n for n in self.nodes if isinstance(n, ast.ClassDef)]

    def imports(self) -> list[tuple[str, ast.stmt]]:
        """Every imported module, wherever the import stands."""
        found: list[tuple[str, ast.stmt]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(alias.name, node) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}: a relative import"
                found.append((node.module or "", node))
                found += [(f"{node.module}.{alias.name}", node) for alias in node.names]
        return found

    @property
    def room(self) -> str:
        """The top folder, or the service below services/."""
        parts = self.name.split("/")
        return "/".join(parts[:2]) if parts[0] == "services" and len(parts) > 2 else parts[0]

    @property
    def is_init(self) -> bool:
        return self.path.name == "__init__.py"


@cache
def product() -> tuple[Source, ...]:
    """Every file of the product rooms."""
    paths = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    assert len(paths) > 60, "the rules look at an empty tree"
    return tuple(Source(p, p.read_text()) for p in paths)


def length(node: ast.AST) -> int:
    """Lines of a definition, decorators and docstring included."""
    return (getattr(node, "end_lineno", 0) or 0) - getattr(node, "lineno", 0) + 1


@cache
def imported() -> dict[str, frozenset[str]]:
    """By file: the files of the tree that it imports, inside functions and for types, too. `__init__` files
    stand for what they import themselves."""
    by_module = {_module(source.name): source for source in product()}

    def files(source: Source, module: str, seen: frozenset[str]) -> set[str]:
        target = by_module.get(module)
        if target is None or target is source or module in seen:
            return set()
        if not target.is_init:
            return {target.name}
        own = {name for inner, _ in target.imports() for name in files(target, inner, seen | {module})}
        return own - {source.name}

    return {
        source.name: frozenset(
            name for module, _ in source.imports() for name in files(source, module, frozenset())
        )
        for source in product()
    }


def named(source: Source) -> set[str]:
    """Files of the tree that a file names in strings, as `module` or `module:function`."""
    texts = (n.value for n in source.nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    words = {text.partition(":")[0] for text in texts}
    return {s.name for s in product() if _module(s.name) in words}


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of names that reach each other."""
    try:
        tuple(TopologicalSorter({name: set(to) - {name} for name, to in arrows.items()}).static_order())
    except CycleError as error:
        return [error.args[1]]
    return []


def _module(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
