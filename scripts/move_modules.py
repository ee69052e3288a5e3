"""Carry a tree drawn before "The rooms of the second house" over to it: modules move, fold, imports follow.

    python scripts/move_modules.py [--table scripts/module_moves.txt] [ROOT]     rewrites ROOT in place

Needs `libcst` (pip install libcst) and a tree with the old paths of the table; `ruff check --fix` and `ruff
format` finish the result. To bring a branch over, run it on two checkouts, one of the commit where the branch
begins (A) and one of its tip (B), and apply the difference of the results to main:

    git diff --no-index A B | git apply --3way

A fold appends the statements of a module to the module it goes into: imports once, definitions that are equal
to the letter once. The docstring of the folded module is dropped and printed. What the table does not decide
is refused, with the place. The table and this program go when no branch needs them.
"""

from __future__ import annotations

import ast
import io
import posixpath
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst
from libcst.metadata import (
    Access,
    Assignment,
    BaseAssignment,
    ClassScope,
    GlobalScope,
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    Scope,
    ScopeProvider,
)

TEXT_FILES = ("*.md", "*.toml", "*.yaml", "*.yml", "*.sh", "scripts/*", ".ci/*", "Dockerfile", "*.tape")
LEFT_ALONE = ("loadtest/results/", "tests/data/", "scripts/module_moves.txt", "scripts/move_modules.py")


class Undecided(Exception):
    """The table does not say what to do."""


def module_of(path: str) -> str:
    """`a/b.py` and `a/b/__init__.py` are `a.b`; what tests share was imported by its bare name, and is of the
    package `support` now."""
    path = re.sub(r"^tests/(?:(?=support/)|(?:unit|contract|pipeline|rules|e2e)/(?=\w+\.py$))", "", path)
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass
class Table:
    """What goes where. A line of the file is one of

    move OLD NEW               the module keeps what it holds
    fold OLD NEW               what it holds goes into NEW
    rename OLD NAME NEW_NAME   a definition of the old module OLD
    as FILE MODULE NAME        in the new FILE the new MODULE is imported under NAME ('-': by its symbols)
    """

    paths: dict[str, str] = field(default_factory=dict)  # old path: new path
    # new path: old paths; the first keeps its docstring
    folded: dict[str, list[str]] = field(default_factory=dict)
    names: dict[tuple[str, str], str] = field(default_factory=dict)
    aliases: dict[tuple[str, str], str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Table:
        table = cls()
        for line in path.read_text().splitlines():
            match line.partition("#")[0].split():
                case []:
                    continue
                case ["move", old, new]:
                    table.paths[old] = new
                    table.folded.setdefault(new, []).insert(0, old)
                case ["fold", old, new]:
                    table.paths[old] = new
                    table.folded.setdefault(new, []).append(old)
                case ["rename", old, name, new]:
                    table.names[module_of(old), name] = new
                case ["as", file, module, name]:
                    table.aliases[file, module] = name
                case _:
                    raise Undecided(f"{path}: no such line: {line}")
        return table

    def path(self, old: str) -> str:
        return self.paths.get(old, old)

    def name(self, module: str, name: str) -> str:
        return self.names.get((module, name), name)


@dataclass(frozen=True)
class Imported:
    """One name that an import binds."""

    module: str
    name: str | None  # None: the module itself, by `import module`
    alias: str | None
    typing: bool  # below `if TYPE_CHECKING:`
    comment: str = ""

    def line(self) -> str:
        alias = f" as {self.alias}" if self.alias else ""
        if self.name is None:
            return f"import {self.module}{alias}{self.comment}"
        return f"from {self.module} import {self.name}{alias}{self.comment}"

    def binds(self) -> str:
        return self.alias or (self.module.partition(".")[0] if self.name is None else self.name)


@dataclass
class Part:
    """What one old module gives to a new one."""

    old: str
    docstring: str
    imports: list[Imported]
    body: str
    needs: set[str]  # new-path siblings whose names are used when the module is imported: old modules
    defines: dict[str, str]  # name: source


@dataclass
class Edit:
    start: int
    end: int
    text: str


class File:
    """One file of the tree, and what the table makes of it."""

    def __init__(self, root: Path, path: str, table: Table, modules: dict[str, str]) -> None:
        self.path, self.table, self.modules = path, table, modules
        self.new_path = table.path(path)
        self.new_module = module_of(self.new_path)
        self.text = (root / path).read_text()
        wrapper = MetadataWrapper(cst.parse_module(self.text), unsafe_skip_copy=True)
        self.tree = wrapper.module
        self.scopes = wrapper.resolve(ScopeProvider)
        self.positions = wrapper.resolve(PositionProvider)
        self.parents = wrapper.resolve(ParentNodeProvider)
        self.line_starts = [0]
        for line in self.text.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.edits: list[Edit] = []
        self.needs: set[str] = set()
        self.local: dict[str, list[Imported]] = defaultdict(list)
        self.extra: list[Imported] = []
        self.problems: list[str] = []

    # -- positions

    def offset(self, line: int, column: int) -> int:
        return self.line_starts[line - 1] + column

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        at = self.positions[node]
        return self.offset(at.start.line, at.start.column), self.offset(at.end.line, at.end.column)

    def source(self, node: cst.CSTNode) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def where(self, node: cst.CSTNode) -> str:
        return f"{self.path}:{self.positions[node].start.line}"

    # -- what a name means

    def target(self, module: str, name: str | None) -> tuple[str, str | None, str]:
        """What an import of `name` of `module` is now: new module, new name (None: a module), old module."""
        if name is not None and f"{module}.{name}" in self.modules:
            old = f"{module}.{name}"
            return module_of(self.table.path(self.modules[old])), None, old
        new = module_of(self.table.path(self.modules[module])) if module in self.modules else module
        return new, None if name is None else self.table.name(module, name), module

    def check_free(self, name: str, access: Access | None, node: cst.CSTNode) -> None:
        """Nothing between the use of `name` and the module binds it."""
        scope: Scope | None = access.scope if access else None
        while scope is not None and not isinstance(scope, GlobalScope):
            if not isinstance(scope, ClassScope) or scope is access.scope:  # type: ignore[union-attr]
                found = scope._assignments.get(name, ())
                if any(isinstance(a, Assignment) and not isinstance(a, ImportAssignment) for a in found):
                    self.problems.append(f"{self.where(node)}: '{name}' is bound in the function")
                    return
            scope = scope.parent

    # -- the file's own definitions

    def all_scopes(self) -> set[Scope]:
        return {s for s in self.scopes.values() if s is not None}

    def assignments(self) -> Iterator[tuple[Scope, BaseAssignment]]:
        for scope in self.all_scopes():
            for assignment in scope.assignments:
                if assignment.scope is scope:
                    yield scope, assignment

    def rewrite(self) -> None:
        module = module_of(self.path)
        for scope, assignment in list(self.assignments()):
            if isinstance(assignment, ImportAssignment):
                self.import_assignment(scope, assignment)
            elif isinstance(scope, GlobalScope) and (module, assignment.name) in self.table.names:
                self.rename(assignment, self.table.names[module, assignment.name])
        self.statements()

    def rename(self, assignment: BaseAssignment, new: str) -> None:
        assert isinstance(assignment, Assignment)
        node = assignment.node
        name = node if isinstance(node, cst.Name) else getattr(node, "name", None)
        if not isinstance(name, cst.Name):
            self.problems.append(f"{self.where(node)}: cannot rename {assignment.name}")
            return
        self.edits.append(Edit(*self.span(name), new))
        for access in assignment.references:
            self.replace_access(access, new)

    def replace_access(self, access: Access, new: str) -> None:
        node = access.node
        while isinstance(node, cst.Attribute):
            node = node.value  # type: ignore[assignment]
        self.check_free(new, access, node)
        if isinstance(node, cst.Name):
            self.edits.append(Edit(*self.span(node), new))
        else:
            self.in_string(node, access, new)

    def in_string(self, node: cst.CSTNode, access: Access, new: str) -> None:
        self.problems.append(f"{self.where(node)}: a name within a string, to become {new}")

    # -- imports

    def import_assignment(self, scope: Scope, assignment: ImportAssignment) -> None:
        statement, bound = assignment.node, assignment.name
        for module, name, alias in entries(statement):
            local = alias or (module if name is None else name)
            if f"{local}.".startswith(f"{bound}."):
                break
        else:
            raise AssertionError(f"{self.where(statement)}: {bound}")
        top = isinstance(scope, GlobalScope)
        typing = top and self.below_type_checking(statement)
        comment = self.comment_of(statement)
        new_module, new_name, old_module = self.target(module, name)
        accesses = list(assignment.references)
        as_module = (name is None or new_name is None) and (old_module in self.modules)
        same = new_module == self.new_module and (old_module in self.modules)
        for access in accesses:
            at_import = isinstance(access.scope, GlobalScope | ClassScope)
            at_import = at_import and not access.is_annotation and not access.is_type_hint
            if same and top and old_module != module_of(self.path) and at_import:
                self.needs.add(old_module)
        if name is None:  # import a.b.c
            if alias is None and old_module in self.modules:
                for access in accesses:
                    self.dotted(access, module, new_module, same)
            if not same:
                self.keep(scope, statement, Imported(new_module, None, alias, typing, comment))
            return
        if not as_module:  # a symbol
            assert new_name is not None
            if same:
                for access in accesses:
                    if local != new_name:
                        self.replace_access(access, new_name)
                    else:
                        self.check_free(new_name, access, access.node)
                return
            if alias is None and new_name != name:
                for access in accesses:
                    self.replace_access(access, new_name)
            new_alias = alias if alias != new_name or alias == name else None
            self.keep(scope, statement, Imported(new_module, new_name, new_alias, typing, comment))
            return
        modules = old_module, new_module
        self.module_import(scope, statement, modules, alias, local, accesses, same, typing, comment)

    def module_import(  # a module by `from package import module`
        self, scope: Scope, statement: cst.CSTNode, modules: tuple[str, str], alias: str | None, local: str,
        accesses: list[Access], same: bool, typing: bool, comment: str,
    ) -> None:  # fmt: skip
        old, new = modules
        package, _, base = new.rpartition(".")
        wanted = self.table.aliases.get((self.new_path, new)) or alias or base
        by_symbols = same or wanted == "-"
        names: set[str] = set()
        for access in accesses:
            node = access.node
            while isinstance(node, cst.Attribute):
                node = node.value  # type: ignore[assignment]
            parent = self.parents[node]
            if not (isinstance(parent, cst.Attribute) and parent.value is node):
                if by_symbols:
                    self.problems.append(f"{self.where(node)}: the module '{local}' itself is used")
                elif wanted != local:
                    self.check_free(wanted, access, node)
                    self.edits.append(Edit(*self.span(node), wanted))
                continue
            attribute = self.table.name(old, parent.attr.value)
            if by_symbols:
                names.add(attribute)
                self.check_free(attribute, access, node)
                self.edits.append(Edit(*self.span(parent), attribute))
                continue
            if wanted != local:
                self.check_free(wanted, access, node)
                self.edits.append(Edit(*self.span(node), wanted))
            if attribute != parent.attr.value:
                self.edits.append(Edit(*self.span(parent.attr), attribute))
        if same:
            return
        if by_symbols:
            for name in sorted(names):
                self.keep(scope, statement, Imported(new, name, None, typing, comment))
            return
        if not package:
            raise Undecided(f"{self.where(statement)}: {new} is at the top")
        if wanted != local and isinstance(scope, GlobalScope):
            clash = [a for a in scope._assignments.get(wanted, ()) if not isinstance(a, ImportAssignment)]
            if clash:
                self.problems.append(f"{self.where(statement)}: give a line `as {self.new_path} {new} NAME`")
        alias = wanted if wanted != base else None
        self.keep(scope, statement, Imported(package, base, alias, typing, comment))

    def dotted(self, access: Access, module: str, new_module: str, same: bool) -> None:
        """`a.b.c.name` of `import a.b.c`."""
        node = access.node
        whole: cst.CSTNode = node
        while isinstance(whole, cst.Attribute):
            whole = whole.value
        while True:
            parent = self.parents[whole]
            extends = isinstance(parent, cst.Attribute) and parent.value is whole
            if self.source(whole) == module and not (extends and self.source(parent) in self.modules):
                break
            if not extends:
                return
            whole = parent
        if self.source(whole) != module:
            return
        parent = self.parents[whole]
        if isinstance(parent, cst.Attribute) and parent.value is whole:
            attribute = self.table.name(module, parent.attr.value)
            if same:
                self.check_free(attribute, access, node)
                self.edits.append(Edit(*self.span(parent), attribute))
            else:
                self.edits.append(Edit(*self.span(parent), f"{new_module}.{attribute}"))
        elif not same:
            self.edits.append(Edit(*self.span(whole), new_module))

    def keep(self, scope: Scope, statement: cst.CSTNode, imported: Imported) -> None:
        if isinstance(scope, GlobalScope):
            if imported not in self.extra:
                self.extra.append(imported)
        else:
            start, _ = self.span(statement)
            if imported not in self.local[str(start)]:
                self.local[str(start)].append(imported)

    def below_type_checking(self, statement: cst.CSTNode) -> bool:
        node: cst.CSTNode | None = statement
        while node is not None and not isinstance(node, cst.Module):
            node = self.parents[node]
            if isinstance(node, cst.If):
                return True
        return False

    def comment_of(self, statement: cst.CSTNode) -> str:
        line = self.parents[statement]
        if isinstance(line, cst.SimpleStatementLine) and line.trailing_whitespace.comment:
            return "  " + line.trailing_whitespace.comment.value
        return ""

    # -- the file in pieces

    def statements(self) -> None:
        """Imports at the top go (they come back merged), local ones are written anew in place."""
        for statement in self.import_statements(self.tree):
            start, end = self.span(statement)
            line = self.parents[statement]
            if self.is_top(statement):
                full_start = self.line_starts[self.positions[line].start.line - 1]
                last = self.positions[line].end.line
                after = self.line_starts[min(last, len(self.line_starts) - 1)]
                self.edits.append(Edit(full_start, after, ""))
                continue
            kept = self.local.get(str(start), [])
            indent = " " * (start - self.line_starts[self.positions[statement].start.line - 1])
            if not kept:  # of what is in the same file now
                last = self.positions[line].end.line
                self.edits.append(Edit(start - len(indent), self.line_starts[last], ""))
                continue
            lines = [i.line().removesuffix(i.comment) for i in kept]
            self.edits.append(Edit(start, end, f"\n{indent}".join(lines)))

    def is_top(self, statement: cst.CSTNode) -> bool:
        node: cst.CSTNode | None = self.parents[self.parents[statement]]
        if isinstance(node, cst.Module):
            return True
        return self.below_type_checking(statement) and not self.in_function(statement)

    def in_function(self, statement: cst.CSTNode) -> bool:
        node: cst.CSTNode = statement
        while not isinstance(node, cst.Module):
            node = self.parents[node]
            if isinstance(node, cst.FunctionDef | cst.ClassDef):
                return True
        return False

    def import_statements(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        if isinstance(node, cst.Import | cst.ImportFrom):
            yield node
            return
        for child in node.children:
            yield from self.import_statements(child)

    def part(self) -> Part:
        """The file as it goes into the new one."""
        self.rewrite()
        docstring = ""
        first = self.tree.body[0] if self.tree.body else None
        if self.tree.get_docstring() is not None:
            assert isinstance(first, cst.SimpleStatementLine)
            docstring = self.source(first.body[0])
            start, _ = self.span(first)
            self.edits.append(Edit(start, self.line_starts[self.positions[first].end.line], ""))
        defines = {}
        for statement in self.tree.body:
            for name in bound_by(statement):
                defines[self.table.name(module_of(self.path), name)] = self.source(statement)
        body = self.apply()
        deeper = self.new_path.count("/") - self.path.count("/")
        body = re.sub(
            r"(__file__\)(?:\.resolve\(\))?\.parents\[)(\d)\]", lambda m: f"{m[1]}{int(m[2]) + deeper}]", body
        )
        body = re.sub(r"^from __future__ import annotations\n", "", body, flags=re.M)
        body = re.sub(r"^if TYPE_CHECKING:\n(?=\S|\n|\Z)", "", body, flags=re.M)
        return Part(self.path, docstring, self.extra, body.strip("\n"), self.needs, defines)

    def apply(self) -> str:
        unique = {(e.start, e.end, e.text) for e in self.edits}
        text, at, out = self.text, 0, []
        for start, end, new in sorted(unique):
            if start < at:
                if end <= at:
                    continue  # within what has been replaced
                raise Undecided(f"{self.path}: edits overlap at {text[start:end]!r}")
            out += [text[at:start], new]
            at = end
        return "".join([*out, text[at:]])


def entries(statement: cst.CSTNode) -> Iterator[tuple[str, str | None, str | None]]:
    """(module, name, alias) of each name of an import."""
    if isinstance(statement, cst.Import):
        for item in statement.names:
            yield dotted_name(item.name), None, alias_of(item)
    elif isinstance(statement, cst.ImportFrom):
        assert statement.module is not None
        assert not isinstance(statement.names, cst.ImportStar)
        for item in statement.names:
            yield dotted_name(statement.module), dotted_name(item.name), alias_of(item)


def alias_of(item: cst.ImportAlias) -> str | None:
    return item.asname.name.value if item.asname and isinstance(item.asname.name, cst.Name) else None


def dotted_name(node: cst.BaseExpression) -> str:
    if isinstance(node, cst.Name):
        return node.value
    assert isinstance(node, cst.Attribute)
    return f"{dotted_name(node.value)}.{node.attr.value}"


def bound_by(statement: cst.CSTNode) -> Iterator[str]:
    """Names that a statement of a module defines."""
    if isinstance(statement, cst.FunctionDef | cst.ClassDef):
        yield statement.name.value
    elif isinstance(statement, cst.SimpleStatementLine):
        for small in statement.body:
            if isinstance(small, cst.Assign):
                for target in small.targets:
                    yield from names_in(target.target)
            elif isinstance(small, cst.AnnAssign):
                yield from names_in(small.target)


def names_in(node: cst.BaseExpression) -> Iterator[str]:
    if isinstance(node, cst.Name):
        yield node.value
    elif isinstance(node, cst.Tuple | cst.List):
        for element in node.elements:
            yield from names_in(element.value)


# -- putting parts together


def ordered(parts: list[Part]) -> list[Part]:
    """The first part first, but behind what it needs when it is imported."""
    done: list[Part] = []
    by_module = {module_of(p.old): p for p in parts}

    def add(part: Part, above: tuple[str, ...]) -> None:
        if part in done:
            return
        if part.old in above:
            raise Undecided(f"circle at import: {' '.join(above)}")
        for need in sorted(part.needs):
            if need in by_module and by_module[need] is not part:
                add(by_module[need], (*above, part.old))
        done.append(part)

    for part in parts:
        add(part, ())
    return done


def without(body: str, name: str, source: str) -> str:
    """`body` less a definition that stands in another part, too."""
    assert body.count(source) == 1, (name, source)
    return body.replace(source, "")


def joined(new_path: str, parts: list[Part]) -> tuple[str, list[str]]:
    """The text of a new file, and what there is to decide."""
    problems: list[str] = []
    seen: dict[str, tuple[Part, str]] = {}
    for part in parts:
        for name, source in part.defines.items():
            if name == "__all__" and name in seen:
                first, of_first = seen[name]
                lists = [ast.literal_eval(text.partition("=")[2].strip()) for text in (of_first, source)]
                merged = f"__all__ = {sorted({*lists[0], *lists[1]})!r}".replace("'", '"')
                first.body, part.body = first.body.replace(of_first, merged), without(part.body, name, source)
                seen[name] = (first, merged)
            elif name not in seen:
                seen[name] = (part, source)
            elif seen[name][1] == source:
                print(f"  once: {new_path}: {name} of {seen[name][0].old} and {part.old}")
                part.body = without(part.body, name, source)
            else:
                problems.append(f"{new_path}: {name} in {seen[name][0].old} and {part.old}")
    bound: dict[str, Imported] = {}
    imports: list[Imported] = []
    for part in parts:
        for imported in part.imports:
            name = imported.binds()
            if imported.name is not None or imported.alias:
                if name in seen:
                    problems.append(
                        f"{new_path}: {name}: imported in {part.old}, defined in {seen[name][0].old}"
                    )
                other = bound.setdefault(name, imported)
                if other.line() != imported.line():
                    problems.append(
                        f"{new_path}: {name}: {other.line()} and, in {part.old}, {imported.line()}"
                    )
            imports.append(imported)
    ready = {(i.module, i.name, i.alias) for i in imports if not i.typing}
    plain = dict.fromkeys(i.line() for i in imports if not i.typing and i.module != "__future__")
    typed = dict.fromkeys(i.line() for i in imports if i.typing and (i.module, i.name, i.alias) not in ready)
    head = [parts[0].docstring] if parts[0].docstring else []
    for part in parts[1:]:
        if part.docstring:
            print(f"  docstring of {part.old}, now in {new_path}:\n{part.docstring}")
    chunks = head
    if any(i.module == "__future__" for i in imports):
        chunks.append("from __future__ import annotations")
    if plain:
        chunks.append("\n".join(plain))
    if typed:
        chunks.append("if TYPE_CHECKING:\n" + "\n".join(f"    {line}" for line in typed))
    text = "\n\n".join(chunks)
    for part in ordered(parts):
        if part.body:
            text += f"\n\n\n{part.body}"
    return text + "\n", problems


class Prose:
    """What becomes of dotted names and of paths in prose, settings, strings and comments."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._new: dict[str, str] = {}
        for (module, name), new_name in table.names.items():
            new = module_of(table.path(module.replace(".", "/") + ".py"))
            self._new |= {f"{module}{sign}{name}": f"{new}{sign}{new_name}" for sign in ".:"}
        for old, new in table.paths.items():
            if old != new:
                self._new |= {old: new}
                if "." in module_of(old):  # a word of prose else
                    self._new |= {module_of(old): module_of(new)}
        longest_first = sorted(self._new, key=len, reverse=True)
        self._pattern = re.compile(rf"(?<![\w/.])(?:{'|'.join(map(re.escape, longest_first))})(?![\w/])")

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._new[found[0]], text)

    def python(self, text: str, old_path: str, new_path: str) -> str:
        """Of a file of Python only strings and comments; there a bare `file.py` is one of its folder, too."""
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        out, at = [], 0
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in (tokenize.STRING, tokenize.COMMENT):
                continue
            begin = starts[token.start[0] - 1] + token.start[1]
            end = starts[token.end[0] - 1] + token.end[1]
            out += [text[at:begin], self._bare(self(text[begin:end]), old_path, new_path)]
            at = end
        return "".join([*out, text[at:]])

    def _bare(self, text: str, old_path: str, new_path: str) -> str:
        def file(found: re.Match[str]) -> str:
            folder = posixpath.dirname(old_path)
            while folder:
                if (old := f"{folder}/{found[0]}") in self._table.paths:
                    return posixpath.relpath(self._table.paths[old], posixpath.dirname(new_path))
                folder = posixpath.dirname(folder)
            return found[0]

        return re.sub(r"(?<![\w/.-])[a-z_0-9]+\.py\b", file, text)


def main(arguments: list[str]) -> int:
    """Rewrite a tree; 1 where the table leaves something open."""
    table_path = Path(__file__).with_name("module_moves.txt")
    if arguments[:1] == ["--table"]:
        table_path, arguments = Path(arguments[1]), arguments[2:]
    root = Path(arguments[0] if arguments else ".")
    table = Table.read(table_path)
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=root, text=True).split()
    paths = [p for p in listed if not p.startswith(LEFT_ALONE) and (root / p).exists()]
    missing = [old for old in table.paths if old not in paths]
    modules = {module_of(p): p for p in paths}
    prose = Prose(table)
    problems = [f"the table moves {old}, which is not there" for old in missing]
    parts: dict[str, list[Part]] = defaultdict(list)
    for path in paths:
        file = File(root, path, table, modules)
        part = file.part()
        part.docstring = part.docstring and prose.python(part.docstring, path, file.new_path)
        part.body = prose.python(part.body, path, file.new_path)
        parts[file.new_path].append(part)
        problems += file.problems
    texts: dict[str, str] = {}
    for new_path, found in parts.items():
        order = {old: i for i, old in enumerate(table.folded.get(new_path, []))}
        found.sort(key=lambda part: order.get(part.old, -1))
        if len(found) == 1 and found[0].old == new_path and not changed(root, found[0]):
            continue
        texts[new_path], more = joined(new_path, found)
        problems += more
    if problems:
        print("\n".join(["", *problems]), file=sys.stderr)
        return 1
    for old, new in table.paths.items():
        if old != new:
            (root / old).unlink()
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    for path in {*paths, *texts}:
        if (root / path).exists() and path not in texts:
            rewrite(root / path, lambda text, path=path: prose.python(text, path, path))
    other = subprocess.check_output(["git", "ls-files", *TEXT_FILES], cwd=root, text=True).splitlines()
    for path in dict.fromkeys(other):
        if not path.startswith(LEFT_ALONE) and not path.endswith(".py"):
            rewrite(root / path, prose)
    return 0


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    """A file of text, where it changes."""
    try:
        before = path.read_text()
    except UnicodeDecodeError:
        return
    if (after := change(before)) != before:
        path.write_text(after)


def changed(root: Path, part: Part) -> bool:
    """Whether anything of a file that stays where it is became otherwise."""
    tree = cst.parse_module((root / part.old).read_text())
    imports = [
        (module, name, alias)
        for line in tree.body
        if isinstance(line, cst.SimpleStatementLine)
        for small in line.body
        for module, name, alias in entries(small)
    ]
    same = {(i.module, i.name, i.alias) for i in part.imports if not i.typing} == set(imports)
    return not (same and part.body in (root / part.old).read_text())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
