"""How code is written: imports, sizes of functions and classes, annotations. test_layout.py has the tree."""

from __future__ import annotations

import ast
import builtins
import statistics

import pytest
from support.source_tree import PRODUCT, FunctionNode, Source, length, product

from shared.config import Settings

SERVICES = (
    "tokenizer",
    "scheduler",
    "executor",
    "kv_offload",
    "detokenizer",
    "gateway",
    "keeper",
    "launcher",
)
TORCH = ("torch", "triton")

QUESTIONS = ("is_", "has_", "can_", "are_", "may_", "must_", "needs_", "was_")
# the first words of functions that do something, and return whether they did
WORDS = """
    accept add admit apply cancel close come copy drain enqueue force forward gather give grow keep
    lower make note pin plan preempt publish pull queue read remove reserve retire start update
    write yield
"""
COMMANDS = WORDS.split()


@pytest.mark.parametrize("source", product(), ids=lambda s: s.name)
def test_imports_go_in_the_allowed_directions(source: Source) -> None:
    top, _, service = source.room.partition("/")
    for module, _ in source.imports():
        head, _, rest = module.partition(".")
        target = rest.partition(".")[0]
        if top == "shared":
            assert head not in ("services", "kernels", "loadtest", *TORCH), module
        if top == "kernels":
            assert head not in ("services", "shared", "loadtest"), module
        if top == "services":
            assert head != "loadtest", module
            if head == "services" and target in SERVICES and service != "launcher":
                assert target == service, f"{service} imports {module}"
            if head == "kernels":
                assert service == "executor", module
            if head in TORCH:
                lmcache = (
                    source.name == "services/kv_offload/backends/lmcache.py"
                )  # its API takes torch's types
                assert service in ("executor", "launcher") or lmcache, module
            if head == "lmcache":
                assert service == "kv_offload", module


def test_no_service_but_its_engine_imports_torch_at_the_top() -> None:
    """`headrace --help` and every light service start without torch."""
    for source in product():
        top, _, service = source.room.partition("/")
        in_process = source.name.startswith(("loadtest/gpu/", "loadtest/eval/"))  # they run the engine
        if in_process or top == "kernels" or (service == "executor" and "torch" in imports_of(source)):
            continue
        for node in source.tree.body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = getattr(node, "module", None) or ""
            assert not {n.partition(".")[0] for n in [*names, module]} & set(TORCH), source.name


def imports_of(source: Source) -> set[str]:
    return {module.partition(".")[0] for module, _ in source.imports()}


def test_functions_are_below_their_limit() -> None:
    """A kernel is one function, whose arguments, pointers and sizes, stand one on a line."""
    kernels = {f"{s.name}:{f.name}": length(f) for s in product() for f in s.functions if _is_kernel(f)}
    sizes = {f"{s.name}:{f.name}": length(f) for s in product() for f in s.functions if not _is_kernel(f)}
    assert {name: n for name, n in sizes.items() if n > 80} == {}
    assert {name: n for name, n in kernels.items() if n > 100} == {}
    assert statistics.quantiles(sizes.values(), n=10)[-1] <= 30


def test_kernels_name_their_own_parameters() -> None:
    """Triton ignores a name in `do_not_specialize` that is no parameter, and compiles for each value."""
    wrong = []
    for source in product():
        for function in source.functions:
            parameters = {each.arg for each in function.args.args}
            for decorator in function.decorator_list:
                for keyword in getattr(decorator, "keywords", []):
                    if keyword.arg == "do_not_specialize":
                        wrong += [
                            (source.name, n) for n in ast.literal_eval(keyword.value) if n not in parameters
                        ]
    assert wrong == []


def test_classes_are_below_their_limit() -> None:
    def methods(node: ast.ClassDef) -> int:
        functions = [n for n in node.body if isinstance(n, FunctionNode)]
        return sum(not any(_name(d) == "property" for d in f.decorator_list) for f in functions)

    sizes = {f"{s.name}:{c.name}": methods(c) for s in product() for c in s.classes}
    assert {name: n for name, n in sizes.items() if n > 30} == {}


def test_functions_have_at_most_8_parameters() -> None:
    def parameters(function: FunctionNode) -> int:
        a = function.args
        names = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
        return len([n for n in names if n not in ("self", "cls")])

    functions = [(s, f) for s in product() for f in s.functions if not _is_kernel(f)]
    counts = {f"{s.name}:{f.name}": parameters(f) for s, f in functions}
    overridden = {name for name in counts if name.endswith("settings_customise_sources")}  # pydantic's own
    assert {n: c for n, c in counts.items() if c > 8 and n not in overridden} == {}


def test_parameters_are_no_wide_tuples() -> None:
    """No parameter is a tuple of more than two; kernels are exempt."""
    found = {
        f"{source.name}:{function.name}"
        for source in product()
        for function in source.functions
        for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if a.annotation is not None and _is_wide(a.annotation) and source.room.partition("/")[0] != "kernels"
    }
    assert found == set()


def test_every_function_is_annotated() -> None:
    bare = []
    for source in product():
        for function in source.functions:
            args = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
            missing = [a.arg for a in args if a.annotation is None and a.arg not in ("self", "cls")]
            if missing or function.returns is None:
                bare.append(f"{source.name}:{function.name} {missing}")
    assert bare == []


def test_a_bool_is_the_answer_to_a_question_or_of_a_command() -> None:
    others = []
    for source in _ours():
        for function in source.functions:
            name = function.name.lstrip("_")
            asks = function.returns is not None and ast.unparse(function.returns) == "bool"
            if asks and not name.startswith((*QUESTIONS, "on_")) and name.split("_")[0] not in COMMANDS:
                others.append(f"{source.name}:{function.name}")
    dunder = ("__contains__", "__eq__", "__bool__")
    assert [name for name in others if not name.endswith(dunder)] == []


def test_handlers_of_subjects_are_named_by_their_event() -> None:
    others = []
    for source in _ours():
        functions = {function.name for function in source.functions}
        for node in source.nodes:
            if isinstance(node, ast.Call) and _name(node.func) == "subscribe" and len(node.args) > 1:
                handler = node.args[1]
                while isinstance(handler, ast.Call) and _name(handler.func) in ("guarded", "partial"):
                    handler = handler.args[0]
                name = _name(handler)
                named = isinstance(handler, ast.Attribute) or name in functions
                if named and not name.lstrip("_").startswith("on_"):
                    others.append(f"{source.name}:{name}")
    assert others == []


def _ours() -> list[Source]:
    """The product, without the folder whose machine code is built from each change of its text."""
    rooms = [s for s in product() if s.name.split("/")[0] in PRODUCT]
    return [s for s in rooms if not s.name.startswith("kernels/cpu_jit/")]


def test_every_file_has_a_docstring() -> None:
    assert [s.name for s in product() if not ast.get_docstring(s.tree)] == []


def test_exceptions_are_not_swallowed() -> None:
    swallowed = []
    for source in product():
        for node in source.nodes:
            if isinstance(node, ast.ExceptHandler) and _is_broad(node):
                body = [n for n in node.body if not isinstance(n, ast.Pass | ast.Continue)]
                if not body:
                    swallowed.append(f"{source.name}:{node.lineno}")
    assert swallowed == []


def test_no_cancellation_is_lost() -> None:
    """In Python 3.11 asyncio.wait_for loses a cancellation that arrives just as the awaited future ends, so
    `headrace up` did not end when a service could not start. asyncio.timeout loses none."""
    ours = [s for s in product() if s.name.split("/")[0] in PRODUCT]
    lossy = [s.name for s in ours if "asyncio.wait_for(" in s.text]
    assert lossy == []


def test_ignores_have_reasons() -> None:
    bare = [
        f"{s.name}:{i}"
        for s in product()
        for i, line in enumerate(s.text.splitlines(), 1)
        if "# type: ignore" in line and "#" not in line.split("# type: ignore", 1)[1]
    ]
    assert bare == []


def test_functions_assign_no_globals() -> None:
    found = [s.name for s in product() for n in s.nodes if isinstance(n, ast.Global)]
    assert found == []


def test_classes_are_no_mixins() -> None:
    assert [c.name for s in product() for c in s.classes if c.name.endswith("Mixin")] == []


def test_no_concrete_class_inherits_from_another() -> None:
    """Parts are composed. Only Actor, Settings, exceptions, protocols, data models and classes of fields
    alone have subclasses."""
    sources = [s for s in product() if s.name.split("/")[0] in PRODUCT]
    bases = {c.name: [_name(_bare(base)) for base in c.bases] for s in sources for c in s.classes}
    built_in = {name: thing for name, thing in vars(builtins).items() if isinstance(thing, type)}
    exceptions = {name for name, kind in built_in.items() if issubclass(kind, BaseException)}
    while more := {name for name, of in bases.items() if exceptions.intersection(of)} - exceptions:
        exceptions |= more
    models = {
        name for name, of in bases.items() if "BaseModel" in of
    }  # fields that two requests have in common
    protocols = {name for name, of in bases.items() if "Protocol" in of}
    fields = {c.name for s in sources for c in s.classes if all(map(_is_field, c.body))}
    concrete = set(bases) - exceptions - protocols - {"Actor", "Settings", *models, *fields}
    found = []
    for source in sources:
        ours = {c.name for c in source.classes}
        ours |= {module.split(".")[-1] for module, _ in source.imports() if module.split(".")[0] in PRODUCT}
        for node in source.classes:
            for base in map(_bare, node.bases):
                root = base.value if isinstance(base, ast.Attribute) else base
                if _name(root) in ours and _name(base) in concrete:
                    found.append(f"{source.name}:{node.name} inherits from {_name(base)}")
    assert found == []


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def test_settings_are_at_most_66() -> None:
    assert 10 < len(Settings.model_fields) <= 66
    assert all(field.description for field in Settings.model_fields.values())


def _is_kernel(function: FunctionNode) -> bool:
    decorators = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return any(
        _name(decorator) in ("jit", "fast", "intrinsic") for decorator in decorators
    )  # Triton, kernels.cpu_jit


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _bare(base: ast.expr) -> ast.expr:
    """A base class without its type arguments."""
    return base.value if isinstance(base, ast.Subscript) else base


def _is_wide(annotation: ast.expr) -> bool:
    """A tuple of three or more, or None; not one of any length."""
    match annotation:
        case ast.BinOp(left=left, right=right):
            return _is_wide(left) or _is_wide(right)
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=parts)):
            return len(parts) > 2
    return False


def _is_broad(node: ast.ExceptHandler) -> bool:
    return node.type is None or _name(node.type) in ("Exception", "BaseException")
