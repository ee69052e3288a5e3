"""Rename the symbols of a tree by a table; what the type checker knows decides which `unit` is meant.

    python scripts/rename_symbols.py [--table scripts/symbol_renames.txt] [--index FILE] [--dry]

Run it in the root of a tree that mypy accepts, then `ruff check --fix`, `ruff format`, this with `--wrap`,
and `ruff format`. It is repeatable: a
name that is gone already is reported, not refused. A name that would meet another thing of the same name in
its class, module or function is refused, and nothing is written.

mypy builds the tree once; each name, attribute, keyword, import and parameter is looked up in what it found:

    package.module.NAME              a class, function or constant of a module
    package.module.Class.NAME        a member, with those that override it
    package.module.function/NAME     a parameter or local name (`package.module.Class.method/NAME`)

Lines of the table (globs as in fnmatch, `#` begins a comment):

    symbol GLOB NEW                  rename what matches
    attr PATH_GLOB OLD NEW           an attribute of an object whose type mypy does not know (tests)
    string PATH_GLOB OLD NEW         a string that is exactly OLD
    text PATH_GLOB REGEX => NEW      comments, docstrings and strings of a .py, all of another file; names in
                                     `backticks` there follow their symbols without a line
    edit PATH_GLOB REGEX => NEW      anything in the file, after all else
    file OLD NEW                     move a file, imports follow
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import inspect
import io
import pickle
import re
import subprocess
import sys
import textwrap
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

LINE = 110
# names that are no words of English: snake_case, TwoHumps, CAPITALS
DISTINCT = re.compile(
    r"\b_?[A-Za-z0-9]+(?:_[A-Za-z0-9]+)+\b|\b_?[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+\b|\b_?[A-Z][A-Z0-9]{3,}\b"
)
LEFT_ALONE = ("CHANGELOG.md", "tests/data/", "scripts/", "docs/benchmarks/", "loadtest/results/")
LARGE = (
    "torch",
    "transformers",
    "numpy",
    "triton",
    "sympy",
    "scipy",
    "lmcache",
    "xgrammar",
    "safetensors",
    "vllm",
)


@dataclass(frozen=True)
class Use:
    """One identifier in a file: where it stands, and what it may be."""

    start: int
    name: str
    meanings: tuple[str, ...]  # full names; () where mypy does not know it
    is_new: bool = False  # it defines the name


@dataclass
class Index:
    uses: dict[str, list[Use]] = field(default_factory=lambda: defaultdict(list))
    # what a scope defines: a name and, in a module, what it stands for
    names: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    errors: list[str] = field(default_factory=list)


def listed(*patterns: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    return [path for path in found if path and Path(path).is_file() and not path.startswith(LEFT_ALONE)]


def module_of(path: str) -> str:
    path = re.sub(r"^tests/(?=support/|compose/|e2e/)", "", path)
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def build_index() -> Index:
    from mypy import build
    from mypy.config_parser import parse_config_file
    from mypy.modulefinder import BuildSource
    from mypy.options import Options

    options = Options()
    parse_config_file(options, lambda: None, "pyproject.toml")
    options.export_types = options.preserve_asts = options.check_untyped_defs = True
    options.incremental = False
    options.namespace_packages = options.explicit_package_bases = True
    options.mypy_path = [".", "tests"]
    options.warn_unreachable = False
    for name in LARGE:
        for glob in (name, name + ".*"):
            options.per_module_options[glob] = {"follow_imports": "skip", "ignore_missing_imports": True}
    sources = [BuildSource(path, module_of(path)) for path in listed("*.py")]
    result = build.build(sources, options)
    index = Index(errors=result.errors)
    for path in listed("*.py"):
        tree = result.files.get(module_of(path))
        if tree is None:
            print(f"mypy has no module {module_of(path)}", file=sys.stderr)
            continue
        Reader(path, tree, result.types, index).read()
    index.uses, index.names = dict(index.uses), dict(index.names)
    return index


@cache
def children_of(kind: type) -> list[str]:
    """The attributes of a node of mypy's that hold what stands in it, and not what it refers to."""
    refers = (
        "node",
        "info",
        "type",
        "unanalyzed_type",
        "names",
        "original_def",
        "definition",
        "is_alias_rvalue",
    )
    found = [
        name for one in kind.__mro__ for name, value in vars(one).items() if inspect.isgetsetdescriptor(value)
    ]
    return [name for name in found if name not in refers]


class Reader:
    """The identifiers of one module: positions by `ast`, meanings by mypy."""

    def __init__(self, path: str, tree: Any, types: dict[Any, Any], index: Index) -> None:
        self.path, self.tree, self.types, self.index = path, tree, types, index
        self.nodes: dict[tuple[Any, ...], Any] = {}
        self.collect(tree)
        self.text = Path(path).read_text()
        self.lines = [0]
        for line in self.text.split("\n"):
            self.lines.append(self.lines[-1] + len(line) + 1)
        self.raw = [line.encode() for line in self.text.split("\n")]
        self.module = module_of(path)
        self.scope: list[tuple[str, str]] = []  # (kind, name) of the classes and functions around

    def collect(self, tree: Any) -> None:
        """The expressions of a module by position. mypy's own visitors are compiled and take no subclass."""
        from mypy import nodes

        kinds = ((nodes.NameExpr, "N"), (nodes.MemberExpr, "M"), (nodes.CallExpr, "C"))
        references = (nodes.TypeInfo, nodes.Var, nodes.TypeAlias, nodes.MypyFile)
        left, seen = [*tree.defs], set[int]()
        while left:
            node = left.pop()
            if isinstance(node, list | tuple):
                left += node
            elif (
                isinstance(node, nodes.Context) and id(node) not in seen and not isinstance(node, references)
            ):
                seen.add(id(node))
                for kind, letter in kinds:
                    if isinstance(node, kind):
                        at = (letter, node.line, node.column, node.end_line, node.end_column)
                        self.nodes.setdefault(at, node)
                left += [getattr(node, name) for name in children_of(type(node))]

    def at(self, line: int, column: int) -> int:
        return self.lines[line - 1] + len(self.raw[line - 1][:column].decode())

    def use(self, start: int, name: str, meanings: set[str], is_new: bool = False) -> None:
        if self.text[start : start + len(name)] != name:
            return
        self.index.uses[self.path].append(Use(start, name, tuple(sorted(meanings)), is_new))

    def read(self) -> None:
        self.index.names[self.module] |= {
            name: found.fullname or "" for name, found in self.tree.names.items()
        }
        self.walk(ast.parse(self.text))

    # what is around

    def function(self) -> str | None:
        """The full name of the outermost function here."""
        parts = [self.module]
        for kind, name in self.scope:
            parts.append(name)
            if kind == "function":
                return ".".join(parts)
        return None

    def local(self, name: str) -> str:
        function = self.function() or self.module
        self.index.names[function + "/"][name] = ""
        return f"{function}/{name}"

    # meanings

    def of_node(self, node: Any) -> set[str]:
        name = getattr(node, "fullname", "") or ""
        return {name} if "." in name else set()

    def of_member(self, kind: Any, name: str) -> set[str] | None:
        """The full names of an attribute of a type, those that it overrides included. None: unknown."""
        from mypy import nodes
        from mypy import types as kinds

        kind = kinds.get_proper_type(kind)
        if kind is None or isinstance(kind, kinds.AnyType):
            return None
        if isinstance(kind, kinds.UnionType):
            found = [
                self.of_member(item, name) for item in kind.items if not isinstance(item, kinds.NoneType)
            ]
            known = [one for one in found if one is not None]
            return set().union(*known) if known else None
        if isinstance(kind, kinds.TypeVarType):
            return self.of_member(kind.upper_bound, name)
        if isinstance(kind, kinds.TupleType):
            return self.of_member(kind.partial_fallback, name)
        if isinstance(kind, kinds.LiteralType):
            return self.of_member(kind.fallback, name)
        if isinstance(kind, kinds.TypeType):
            return self.of_member(kind.item, name)
        if isinstance(kind, kinds.FunctionLike):
            return self.of_info(kind.type_object(), name) if kind.is_type_obj() else set()
        if isinstance(kind, kinds.Instance):
            if kind.type.fullname == "types.ModuleType":
                return None
            found_here = self.of_info(kind.type, name)
            return found_here if found_here or not kind.type.fallback_to_any else None
        if isinstance(kind, nodes.TypeInfo):
            return self.of_info(kind, name)
        return set()

    def of_info(self, info: Any, name: str) -> set[str]:
        return {f"{one.fullname}.{name}" for one in info.mro if name in one.names}

    def parameter(self, callee: Any, name: str) -> set[str]:
        """What the keyword `name` means in a call of `callee`."""
        from mypy import nodes

        node = getattr(callee, "node", None)
        if node is None and isinstance(callee, nodes.MemberExpr):
            found = self.of_member(self.types.get(callee.expr), callee.name) or set()
            return {f"{one}/{name}" for one in found} | self.of_class_object(callee, name)
        if isinstance(node, nodes.TypeAlias):
            return self.of_class_object(callee, name)
        if isinstance(node, nodes.TypeInfo):
            return self.of_constructor(node, name)
        if isinstance(node, nodes.Var):
            return self.of_class_object(callee, name) | {f"{node.fullname}/{name}"}
        if node is not None and "." in (node.fullname or ""):
            return {f"{node.fullname}/{name}"}
        return set()

    def of_class_object(self, callee: Any, name: str) -> set[str]:
        from mypy import types as kinds

        kind = kinds.get_proper_type(self.types.get(callee))
        if isinstance(kind, kinds.FunctionLike) and kind.is_type_obj():
            return self.of_constructor(kind.type_object(), name)
        if isinstance(kind, kinds.TypeType) and isinstance(kind.item, kinds.Instance):
            return self.of_constructor(kind.item.type, name)
        return set()

    def of_constructor(self, info: Any, name: str) -> set[str]:
        from mypy import nodes

        for one in info.mro:
            made = one.names.get("__init__")
            if made is None or not isinstance(made.node, nodes.FuncDef) or made.plugin_generated:
                continue
            if one.fullname != "builtins.object":
                return {f"{one.fullname}.__init__/{name}"}
        return self.of_info(info, name)

    # the walk

    def key(self, kind: str, node: Any) -> Any:
        return self.nodes.get((kind, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset))

    def walk(self, node: ast.AST) -> None:
        handler = getattr(self, "on_" + type(node).__name__, None)
        if handler is not None:
            handler(node)
        else:
            for child in ast.iter_child_nodes(node):
                self.walk(child)

    def children(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self.walk(child)

    def definition(self, node: Any, word: str) -> None:
        start = self.at(node.lineno, node.col_offset)
        match = re.compile(rf"(?:async\s+)?{word}\s+(\w+)").match(self.text, start)
        assert match, (self.path, node.lineno)
        in_function = self.function()
        if in_function:
            meanings = {self.local(node.name)}
        else:
            meanings = self.in_class(node.name) or {f"{self.module}.{node.name}"}
        self.use(match.start(1), node.name, meanings, True)

    def in_class(self, name: str) -> set[str]:
        if not self.scope or self.scope[-1][0] != "class" or self.function():
            return set()
        info = self.info()
        full = ".".join([self.module, *(one for _, one in self.scope), name])
        return (self.of_info(info, name) if info else set()) | {full}

    def info(self) -> Any:
        from mypy import nodes

        names, info = self.tree.names, None
        for kind, name in self.scope:
            found = names.get(name)
            if kind != "class" or found is None or not isinstance(found.node, nodes.TypeInfo):
                break
            info, names = found.node, found.node.names
        if info is not None:
            for one in info.names:
                self.index.names[info.fullname][one] = f"{info.fullname}.{one}"
        return info

    def inside(self, kind: str, node: Any) -> None:
        self.scope.append((kind, node.name))
        for statement in node.body:
            self.walk(statement)
        self.scope.pop()

    def on_ClassDef(self, node: ast.ClassDef) -> None:
        self.definition(node, "class")
        for child in [*node.decorator_list, *node.bases, *node.keywords]:
            self.walk(child)
        self.inside("class", node)

    def on_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.definition(node, "def")
        for child in [*node.decorator_list, *filter(None, [node.returns])]:
            self.walk(child)
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.walk(default)
        self.scope.append(("function", node.name))
        self.arguments(node.args)
        self.scope.pop()
        self.inside("function", node)

    on_AsyncFunctionDef = on_FunctionDef

    def arguments(self, given: ast.arguments) -> None:
        for one in [
            *given.posonlyargs,
            *given.args,
            *given.kwonlyargs,
            *filter(None, [given.vararg, given.kwarg]),
        ]:
            self.use(self.at(one.lineno, one.col_offset), one.arg, {self.local(one.arg)}, True)
            if one.annotation is not None:
                self.walk(one.annotation)

    def on_Lambda(self, node: ast.Lambda) -> None:
        self.arguments(node.args)
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.walk(default)
        self.walk(node.body)

    def on_Name(self, node: ast.Name) -> None:
        from mypy import nodes

        start = self.at(node.lineno, node.col_offset)
        found = self.key("N", node)
        known = getattr(found, "node", None)
        is_new = isinstance(node.ctx, ast.Store)
        if known is not None and "." in (known.fullname or "") and found.kind != nodes.LDEF:
            meanings = self.in_class(node.id) if found.kind == nodes.MDEF else {known.fullname}
            self.use(start, node.id, meanings or {known.fullname}, is_new)
        elif found is not None and found.kind == nodes.LDEF:
            full = getattr(known, "fullname", "")
            if "." in full and full == self.imported.get(node.id):  # imported in the function
                self.use(start, node.id, {full}, is_new)
                return
            self.use(start, node.id, {self.local(node.id)}, is_new)
        else:  # an annotation, or code that mypy does not reach
            self.use(start, node.id, self.by_name(node.id), is_new)

    imported: dict[str, str] = {}  # noqa: RUF012

    def by_name(self, name: str) -> set[str]:
        function = self.function()
        if function and name in self.index.names[function + "/"]:
            return {f"{function}/{name}"}
        if name in self.tree.names:
            symbol = self.tree.names[name]
            return {symbol.fullname} if symbol.fullname else set()
        if name in self.imported:
            return {self.imported[name]}
        return {self.local(name)} if function else set()

    def on_Assign(self, node: ast.Assign) -> None:
        self.children(node)
        name = node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""
        if name in ("__all__", "__slots__", "__match_args__"):
            for one in ast.walk(node.value):
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    meanings = self.by_name(one.value) if name == "__all__" else self.in_class(one.value)
                    self.use(self.at(one.lineno, one.col_offset) + 1, one.value, meanings)

    def on_Attribute(self, node: ast.Attribute) -> None:
        self.walk(node.value)
        found = self.key("M", node)
        end = self.at(node.end_lineno or 0, node.end_col_offset or 0)
        start = end - len(node.attr)
        is_new = isinstance(node.ctx, ast.Store)
        meanings: set[str] | None
        if found is not None and found.expr in self.types and not self.is_module(found.expr):
            meanings = self.of_member(self.types[found.expr], node.attr)
        elif found is not None:
            meanings = self.of_node(found.node) or (
                {found.fullname} if "." in (found.fullname or "") else None
            )
        else:
            meanings = self.of_path(node)
        if meanings is not None and not meanings and isinstance(node.value, ast.Call):
            meanings = self.of_super(node) or meanings
        if meanings is None:
            meanings = self.of_super(node) or self.of_self(node)
        self.use(start, node.attr, meanings or set(), is_new)

    def is_module(self, expr: Any) -> bool:
        from mypy import nodes

        return isinstance(getattr(expr, "node", None), nodes.MypyFile)

    def of_super(self, node: ast.Attribute) -> set[str]:
        if (
            isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
            and node.value.func.id == "super"
        ):
            info = self.info()
            return self.of_info(info, node.attr) if info else set()
        return set()

    def of_self(self, node: ast.Attribute) -> set[str]:
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            info = self.info()
            return self.of_info(info, node.attr) if info else set()
        return set()

    def of_path(self, node: ast.Attribute) -> set[str] | None:
        """`module.Name` in an annotation."""
        if not isinstance(node.value, ast.Name) or node.value.id not in self.tree.names:
            return None
        symbol = self.tree.names[node.value.id]
        names = getattr(symbol.node, "names", None)
        if names and node.attr in names:
            return {names[node.attr].fullname or f"{symbol.fullname}.{node.attr}"}
        return None

    def on_Call(self, node: ast.Call) -> None:
        self.children(node)
        found = self.key("C", node)
        name = ast.unparse(node.func).rpartition(".")[2]
        for keyword in node.keywords:
            if keyword.arg is None:
                continue
            meanings: set[str] = set()
            if found is not None:
                if name == "replace" and found.args:
                    meanings = self.of_member(self.types.get(found.args[0]), keyword.arg) or set()
                elif name == "partial" and found.args:
                    meanings = self.parameter(found.args[0], keyword.arg)
                else:
                    meanings = self.parameter(found.callee, keyword.arg)
            self.use(self.at(keyword.lineno, keyword.col_offset), keyword.arg, meanings)
        self.attribute_by_string(node, found, name)

    def attribute_by_string(self, node: ast.Call, found: Any, name: str) -> None:
        """`setattr(thing, "name", …)`, `monkeypatch.setattr(module, "name", …)`."""
        if name == "cast" and node.args and isinstance(node.args[0], ast.Constant):
            given = node.args[0]
            self.use(self.at(given.lineno, given.col_offset) + 1, given.value, self.by_name(given.value))
        if name not in ("setattr", "getattr", "hasattr", "delattr", "object", "attrgetter") or found is None:
            return
        for place, given in enumerate(node.args[:2]):
            if (
                place
                and isinstance(given, ast.Constant)
                and isinstance(given.value, str)
                and given.value.isidentifier()
            ):
                of = found.args[place - 1]
                if self.is_module(of):
                    inner = of.node.names.get(given.value)
                    meanings = {inner.fullname or f"{of.node.fullname}.{given.value}"} if inner else set()
                else:
                    meanings = self.of_member(self.types.get(of), given.value) or set()
                self.use(self.at(given.lineno, given.col_offset) + 1, given.value, meanings)

    def on_ImportFrom(self, node: ast.ImportFrom) -> None:
        for one in node.names:
            if one.name == "*":
                continue
            full = f"{node.module}.{one.name}"
            symbol = self.tree.names.get(one.asname or one.name)
            if symbol is not None and symbol.fullname and not self.scope:
                full = symbol.fullname
            if one.asname is None:
                self.imported = {**self.imported, one.name: full}
            self.use(self.at(one.lineno, one.col_offset), one.name, {full})

    def on_MatchClass(self, node: ast.MatchClass) -> None:
        from mypy import nodes

        self.children(node)
        found = self.key("N" if isinstance(node.cls, ast.Name) else "M", node.cls)
        info = getattr(found, "node", None)
        for name, pattern in zip(node.kwd_attrs, node.kwd_patterns, strict=True):
            start = self.at(pattern.lineno, pattern.col_offset)
            match = re.search(rf"({name})\s*=\s*$", self.text[:start][-len(name) - 40 :])
            if match:
                meanings = self.of_info(info, name) if isinstance(info, nodes.TypeInfo) else set()
                self.use(start - len(match[0]), name, meanings)

    def on_MatchAs(self, node: ast.MatchAs) -> None:
        self.children(node)
        if node.name:
            end = self.at(node.end_lineno or 0, node.end_col_offset or 0)
            self.use(end - len(node.name), node.name, {self.local(node.name)}, True)

    def on_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.children(node)
        if node.name and node.type is not None:
            start = self.at(node.type.end_lineno or 0, node.type.end_col_offset or 0)
            match = re.compile(r"[\s)]*as\s+(\w+)").match(self.text, start)
            if match:
                self.use(match.start(1), node.name, {self.local(node.name)}, True)

    def on_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        start = self.at(node.lineno, node.col_offset)
        for name in node.names:
            match = re.compile(rf"\b{name}\b").search(self.text, start)
            if match:
                is_local = isinstance(node, ast.Nonlocal)
                self.use(match.start(), name, {self.local(name)} if is_local else {f"{self.module}.{name}"})

    on_Nonlocal = on_Global


@dataclass
class Table:
    symbols: list[tuple[str, str]] = field(default_factory=list)
    attrs: list[tuple[str, str, str]] = field(default_factory=list)
    strings: list[tuple[str, str, str]] = field(default_factory=list)
    texts: list[tuple[str, str, str]] = field(default_factory=list)
    edits: list[tuple[str, str, str]] = field(default_factory=list)
    files: list[tuple[str, str]] = field(default_factory=list)

    def moves(self, old: str, new: str) -> None:
        self.files.append((old, new))
        if old.endswith(".py"):
            self.symbols.append((module_of(old), module_of(new).rpartition(".")[2]))

    @classmethod
    def read(cls, path: Path) -> Table:
        table = cls()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            kind, _, rest = line.partition(" ")
            rest = rest.strip()
            if not line.strip() or line.startswith("#"):
                continue
            if kind in ("text", "edit"):
                glob, _, change = rest.partition(" ")
                old, arrow, new = change.strip().partition(" => ")
                if not arrow:
                    old, arrow, new = change.strip().removesuffix(" =>"), "=>", ""
                (table.texts if kind == "text" else table.edits).append((glob, old.strip(), new))
                continue
            words = rest.partition("  #")[0].split()
            try:
                {
                    "symbol": lambda w: table.symbols.append((w[0], w[1])),
                    "attr": lambda w: table.attrs.append((w[0], w[1], w[2])),
                    "string": lambda w: table.strings.append((w[0], w[1], w[2])),
                    "file": lambda w: table.moves(w[0], w[1]),
                }[kind](words)
            except (KeyError, IndexError):
                raise SystemExit(f"{path}:{number}: {line}") from None
        return table


class Renamer:
    def __init__(self, table: Table, index: Index) -> None:
        self.table, self.index = table, index
        self.used: dict[str, int] = defaultdict(int)
        self.known: dict[str, str | None] = {}
        self.by_last: dict[str, list[tuple[re.Pattern[str], str, str]]] = defaultdict(list)
        for glob, new in table.symbols:
            last = re.split(r"[./]", glob)[-1]
            self.by_last[last].append((re.compile(fnmatch.translate(glob)), new, f"symbol {glob} {new}"))
        self.problems: set[str] = set()
        self.unknown: set[str] = set()
        self.counts: dict[tuple[str, str], int] = defaultdict(int)
        self.modules = {module_of(path) for path in index.uses}

    def new_name(self, meaning: str) -> str | None:
        """The new name of a full name; the last line of the table that matches decides."""
        if meaning not in self.known:
            self.known[meaning] = None
            for pattern, new, line in self.by_last.get(re.split(r"[./]", meaning)[-1], ()):
                if pattern.match(meaning):
                    self.used[line] += 1
                    self.known[meaning] = new
        return self.known[meaning]

    def changes(self, path: str) -> Iterator[tuple[int, str, str]]:
        for use in self.index.uses.get(path, ()):
            named = [one for one in use.meanings if re.split(r"[./]", one)[-1] == use.name]  # not an alias
            found = {self.new_name(meaning) for meaning in named}
            new = {name for name in found if name is not None}
            if not use.meanings:
                for glob, old, name in self.table.attrs:
                    if old == use.name and fnmatch.fnmatch(path, glob):
                        self.used[f"attr {glob} {old} {name}"] += 1
                        new = {name}
                if not new and use.name in self.by_last:
                    line = Path(path).read_text()[: use.start].count("\n") + 1
                    self.unknown.add(f"{path}:{line}: {use.name}")
            if len(new) > 1:
                self.problems.add(f"{path}: {use.name} is {sorted(use.meanings)}: {sorted(new)}")
            elif new:
                name = new.pop()
                if name != use.name:
                    yield use.start, use.name, name
                    self.counts[use.name, name] += 1
                    for meaning in use.meanings:
                        self.meet(path, meaning, name)

    def meet(self, path: str, meaning: str, new: str) -> None:
        """Refuses a new name that the scope has for another thing that keeps it."""
        cut = max(meaning.rfind("."), meaning.rfind("/"))
        is_local = meaning[cut] == "/"
        scope = meaning[: cut + 1] if is_local else meaning[:cut]
        if new in self.index.names.get(scope, ()):
            taken_by = self.index.names[scope][new] or scope + new
            if self.new_name(taken_by) in (None, new):
                self.problems.add(f"{path}: {meaning} -> {new}, which is there already")
        here = self.index.names.get(module_of(path), {})
        is_global = scope in self.modules
        if (
            is_global
            and new in here
            and self.new_name(here[new]) in (None, new)
            and here[new] != f"{scope}.{new}"
        ):
            self.problems.add(f"{path}: {meaning} -> {new}, which this module has for another thing")


def mentioned(text: str, names: dict[str, str]) -> str:
    """The names in `backticks`, and those that are no words of English, with their new names."""

    def renamed(match: re.Match[str]) -> str:
        return names.get(match[0], match[0])

    text = re.sub(
        r"(?<!`)`[^`\n]+`(?!`)", lambda quoted: re.sub(r"\b[A-Za-z_]\w*\b", renamed, quoted[0]), text
    )
    return DISTINCT.sub(renamed, text)


def retexted(text: str, path: str, table: Table, used: dict[str, int], names: dict[str, str]) -> str:
    here = [one for one in table.texts if fnmatch.fnmatch(path, one[0])]
    texts = [(re.compile(old), new, f"text {glob} {old}") for glob, old, new in here]
    strings = {}
    for glob, old, new in table.strings:
        if fnmatch.fnmatch(path, glob):
            strings[old] = (new, f"string {glob} {old}")

    def changed(piece: str) -> str:
        for pattern, new, line in texts:
            piece, count = pattern.subn(new, piece)
            used[line] += count
        return piece

    if not path.endswith(".py"):
        return changed(mentioned(text, names) if path.endswith(".md") else text)
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    pieces, last = [], 0
    begins = True  # a statement
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            start = lines[token.start[0] - 1] + token.start[1]
            end = lines[token.end[0] - 1] + token.end[1]
            new = token.string
            match = re.fullmatch(r"""([rbuf]*)(['"])([\w.=,:/-]*)\2""", new)
            if match and match[3] in strings:
                to, line = strings[match[3]]
                used[line] += 1
                new = f"{match[1]}{match[2]}{to}{match[2]}"
            if begins or token.type == tokenize.COMMENT:
                new = mentioned(new, names)
            pieces += [text[last:start], changed(new)]
            last = end
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            begins = True
        elif token.type not in (tokenize.COMMENT, tokenize.NL):
            begins = False
    return "".join([*pieces, text[last:]])


def wrapped(text: str) -> str:
    """Comments and paragraphs of docstrings that have become too long for a line, filled anew."""
    lines = text.split("\n")
    if all(len(line) <= LINE for line in lines):
        return text
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        first, last = token.start[0] - 1, token.end[0] - 1
        told = re.match(r"# (type|noqa|fmt|pragma|ruff)\b", token.string)  # to a tool
        if token.type == tokenize.COMMENT and len(lines[first]) > LINE and not told:
            before = lines[first][: token.start[1]]
            indent = before if not before.strip() else before[: len(before) - len(before.lstrip())]
            filled = textwrap.wrap(token.string[2:], LINE - len(indent) - 2)
            kept = [before.rstrip()] if before.strip() else []
            lines[first : first + 1] = [*(f"{indent}# {line}" for line in filled), *kept]
        docstring = token.string.startswith('"""') and not token.line[: token.start[1]].strip()
        if docstring and any(len(line) > LINE for line in lines[first : last + 1]):
            indent = " " * token.start[1]
            blocks = re.split(r"\n[ ]*\n", "\n".join(lines[first : last + 1]))
            lines[first : last + 1] = "\n\n".join(filled_block(block, indent) for block in blocks).split("\n")
    return "\n".join(lines)


def filled_block(block: str, indent: str) -> str:
    lines = block.split("\n")
    plain = all(line.startswith(indent) and not line[len(indent) :].startswith(" ") for line in lines)
    columns = any("  " in line.strip() for line in lines)  # a table
    if not plain or columns or all(len(line) <= LINE for line in lines):
        return block
    end = lines.pop() if lines[-1].strip() == '"""' else None
    words = " ".join(line.strip() for line in lines)
    wrapper = textwrap.TextWrapper(LINE, indent, indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(words) + (f"\n{end}" if end is not None else "")


def unambiguous(changes: Iterable[tuple[int, str, str]]) -> dict[str, str]:
    """The old names that have one new name."""
    names: dict[str, set[str]] = defaultdict(set)
    for _, old, new in changes:
        names[old].add(new)
    return {old: next(iter(new)) for old, new in names.items() if len(new) == 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, default=Path("scripts/symbol_renames.txt"))
    parser.add_argument("--index", type=Path, help="keep what mypy found in this file, and use it again")
    parser.add_argument("--dry", action="store_true", help="print what would happen")
    parser.add_argument(
        "--wrap", action="store_true", help="nothing but: fill long comments and docstrings anew"
    )
    given = parser.parse_args()
    if given.wrap:
        for path in listed("*.py"):
            text = Path(path).read_text()
            if (new := wrapped(text)) != text:
                Path(path).write_text(new)
        return
    table = Table.read(given.table)
    if given.index and given.index.exists():
        index = pickle.loads(given.index.read_bytes())
    else:
        index = build_index()
        if given.index:
            given.index.write_bytes(pickle.dumps(index))
    renamer = Renamer(table, index)
    written: dict[str, str] = {}
    found = {path: sorted(set(renamer.changes(path)), reverse=True) for path in listed("*.py")}
    everywhere = unambiguous(change for changes in found.values() for change in changes)
    kept = {use.name for path in found for use in index.uses.get(path, ())}
    kept -= {old for changes in found.values() for _, old, _ in changes}
    distinct = {old: new for old, new in everywhere.items() if DISTINCT.fullmatch(old) and old not in kept}
    for path, changes in found.items():
        new = Path(path).read_text()
        for start, old, name in changes:
            if new[start : start + len(old)] != old:
                sys.exit(f"{path} is not as mypy has seen it: leave out --index")
            new = new[:start] + name + new[start + len(old) :]
        new = retexted(new, path, table, renamer.used, distinct | unambiguous(changes))
        written[path] = edited(new, path, table, renamer.used)
    for path in listed():
        named = any(fnmatch.fnmatch(path, glob) for glob, _, _ in table.texts + table.edits)
        if not path.endswith(".py") and (named or path.endswith(".md")):
            try:
                text = Path(path).read_text()
            except UnicodeDecodeError:
                continue
            new = retexted(text, path, table, renamer.used, distinct)
            written[path] = edited(new, path, table, renamer.used)
    for line in sorted(renamer.unknown):
        print("unknown type:", line)
    for problem in sorted(renamer.problems):
        print("refused:", problem)
    for line in table_lines(table):
        if not renamer.used.get(line):
            print("not found:", line)
    if given.dry or renamer.problems:
        sys.exit(bool(renamer.problems))
    for path, text in written.items():
        if Path(path).read_text() != text:
            Path(path).write_text(text)
    for old, new_path in table.files:
        if Path(old).exists():
            Path(new_path).parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "mv", old, new_path], check=True)
    for (old, new), count in sorted(renamer.counts.items()):
        print(f"{count:5} {old} -> {new}")


def edited(text: str, path: str, table: Table, used: dict[str, int]) -> str:
    for glob, old, new in table.edits:
        if fnmatch.fnmatch(path, glob):
            text, count = re.subn(old, new, text, flags=re.M)
            used[f"edit {glob} {old}"] += count
    for old, new in table.files:
        text = text.replace(old, new)
        if old.endswith(".py"):
            text = re.sub(rf"\b{re.escape(module_of(old))}\b", module_of(new), text)
    return text


def table_lines(table: Table) -> list[str]:
    return [
        *(f"symbol {glob} {new}" for glob, new in table.symbols),
        *(f"attr {glob} {old} {new}" for glob, old, new in table.attrs),
        *(f"string {glob} {old}" for glob, old, _ in table.strings),
        *(f"text {glob} {old}" for glob, old, _ in table.texts),
        *(f"edit {glob} {old}" for glob, old, _ in table.edits),
    ]


if __name__ == "__main__":
    main()
