"""The tree: sizes of files and folders, layers, no circles, nothing that is never reached, and the one path.

The one path is what a newcomer reads to follow a request: everything else hangs off it in folders that could
be deleted, and of a service only `core` and `actor` import those.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest
from support.source_tree import PRODUCT, ROOT, Source, circles, imported, named, product
from support.without_folder import DELETABLE, LINES, module_of, names

MOST_LINES, LEAST_LINES, MOST_FILES = 850, 30, 20
SMALL = 100
CORE = "core outside the deletable folders"

# What a file of a layer may import of its service: its own layer and those before it. Within a layer any
# order that has no circle.
LAYERS = {
    "services/scheduler": (
        ("state",),
        (
            "adapters", "admission", "executors", "headroom", "kv_tiers", "lifecycle", "load_shedding",
            "overlap", "preemption", "prefix_cache", "recovery", "results", "sessions", "speculation",
            "step_planner",
        ),
        ("core",),
        ("reports",),
        ("actor",),
    ),
    "services/executor": (
        ("engine",),
        ("device_thread", "parallel", "sampling", "speculation"),
        ("model",),
        ("checkpoint",),
        ("quantised",),
        ("kv_transfer", "sim", "adapters"),
        ("cpu", "cuda"),
        ("encoder", "group"),
        ("build",),
        ("actor",),
    ),
}  # fmt: skip

# A request's way: shared, tokenizer, scheduler, executor on a CPU, detokenizer.
ONE_PATH = (
    "shared/actor/", "shared/nats/", "shared/vocab/", "shared/api.py", "shared/clock.py", "shared/codec.py",
    "shared/errors.py", "shared/kv_blocks.py", "shared/messages.py",
    "services/tokenizer/",
    "services/scheduler/",
    "services/executor/actor.py", "services/executor/engine.py", "services/executor/device_thread.py",
    "services/executor/model/", "services/executor/checkpoint/", "services/executor/sampling/",
    "services/executor/cpu/",
    "services/detokenizer/",
)  # fmt: skip
HANGING = (
    "services/scheduler/executors/", "services/scheduler/kv_tiers/", "services/scheduler/recovery.py",
    "services/scheduler/adapters.py", "services/tokenizer/adapters.py",
    "services/scheduler/preemption.py", "services/scheduler/reports/", "services/scheduler/sessions/",
    "services/scheduler/speculation.py",
    "services/detokenizer/durable/", "services/detokenizer/clients.py", "services/detokenizer/failover.py",
    "services/detokenizer/reconnect.py",
    "services/tokenizer/standby.py", "services/tokenizer/queries.py", "services/tokenizer/aliases.py",
    "services/tokenizer/structured_output.py", "services/tokenizer/template_probe.py",
    "services/tokenizer/loading.py",
    "shared/nats/jetstream.py",
    "shared/actor/process.py", "shared/nats/object_store.py", "shared/nats/permissions.py",
    "services/executor/cpu/autotune.py", "services/executor/build.py",
    "services/executor/cpu/compiled.py", "services/executor/sampling/grammar_matchers.py",
    "services/executor/sampling/logits_processors.py",
    "services/executor/quantised/", "shared/vocab/gguf.py", "shared/vocab/vectors.py",
)  # fmt: skip

# The files that import a hanging folder although they are neither core nor actor: to be fewer, never more.
KNOWS_HANGING = {
    "services/scheduler/admission.py", "services/scheduler/lifecycle.py",
    "services/scheduler/results.py", "services/scheduler/step_planner.py",
}  # fmt: skip

# The engines have parts of the same names, and two mechanisms have a worker.
TWINS = {"kernels": {"gpu.py", "ref.py"}, "services/executor": {"engine.py", "model.py", "worker.py"}}

# A line of a table: without it the table is a table.
OF_TABLE = re.compile(r'(?:(?:"[\w.-]+"|\(.*\)): )?"[\w.]+:\w+",')

UNIT = ROOT / "tests" / "unit"


@cache
def the_product() -> Mapping[str, int]:
    """Lines by file."""
    return MappingProxyType(
        {s.name: s.lines for s in product() if s.name.split("/")[0] in PRODUCT and not s.is_init}
    )


def on_the_path() -> list[str]:
    return [name for name in the_product() if name.startswith(ONE_PATH) and not name.startswith(HANGING)]


def test_files_are_below_their_limit() -> None:
    sizes = {s.name: s.lines for s in product() if not s.is_init}
    assert {name: n for name, n in sizes.items() if n > MOST_LINES} == {}
    small = {name: n for name, n in the_product().items() if n < LEAST_LINES}
    assert {name for name in small if Path(name).name not in ("ref.py", "gpu.py")} == set()


def test_folders_are_below_their_limit() -> None:
    files = Counter(str(Path(name).parent) for name in the_product())
    assert {folder: n for folder, n in files.items() if n > MOST_FILES} == {}


def test_imports_have_no_circle() -> None:
    assert circles({name: to for name, to in imported().items() if name.split("/")[0] in PRODUCT}) == []


@pytest.mark.parametrize("service", LAYERS)
def test_imports_within_a_service_go_down(service: str) -> None:
    """Among files and folders at the first level, of which there are at most 20, there is no circle."""
    level = {part: i for i, layer in enumerate(LAYERS[service]) for part in layer}
    arrows: dict[str, set[str]] = defaultdict(set)
    for name, targets in imported().items():
        if name.startswith(f"{service}/") and not name.endswith("__init__.py"):
            arrows[_part(service, name)] |= {
                _part(service, to) for to in targets if to.startswith(f"{service}/")
            }
    assert set(arrows) == set(level)
    assert len(arrows) <= MOST_FILES
    assert {(part, to) for part, found in arrows.items() for to in found if level[to] > level[part]} == set()
    assert circles(arrows) == []


def test_every_module_is_reached() -> None:
    """From the command line and the client library, by imports and by names in strings."""
    by_name = {s.name: s for s in product()}
    reached: set[str] = set()
    todo = ["services/launcher/cli.py", "headrace/__init__.py"]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += [*imported()[name], *named(by_name[name])]
    assert set(the_product()) - reached == set()


def test_a_basename_occurs_once_in_a_room() -> None:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for source in product():
        if source.name in the_product():
            found[source.room][source.path.name] += 1
    again = {room: {n for n, count in names.items() if count > 1} for room, names in found.items()}
    assert {room: names for room, names in again.items() if names - TWINS.get(room, set())} == {}


def test_the_unit_tests_mirror_the_tree() -> None:
    """`tests/unit/FOLDER/test_MODULE.py` or `test_MODULE_ASPECT.py`; `test_all_*.py`: of a whole folder."""
    astray = []
    for path in UNIT.rglob("*.py"):
        folder = path.parent.relative_to(UNIT)
        rooms = {p.stem for p in (ROOT / folder).iterdir() if p.name != "__init__.py"} | {"all"}
        name = path.stem.removeprefix("test_")
        if not any(name == room or name.startswith(f"{room}_") for room in rooms):
            astray.append(str(path.relative_to(ROOT)))
    assert astray == []


def rooms() -> dict[str, list[int]]:
    """The lines of each file, by room."""
    lines = the_product()
    found: dict[str, list[int]] = defaultdict(list)
    for name, count in lines.items():
        parts = name.split("/")
        found["/".join(parts[:2]) if parts[0] == "services" else parts[0]].append(count)
    small = [count for count in lines.values() if count < SMALL]
    path = [lines[name] for name in on_the_path()]
    core = [count for name, count in lines.items() if not name.startswith(tuple(DELETABLE))]
    return {
        **found, "product": list(lines.values()), CORE: core, "the one path": path,
        "files below 100 lines": small,
    }  # fmt: skip


def budgets() -> dict[str, tuple[int, int]]:
    """The most files and lines of each room, as docs/budgets.md has them."""
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| *([\d,]*) *\|", (ROOT / "docs/budgets.md").read_text(), re.M)
    return {room: (int(files), int(lines.replace(",", "") or 0)) for room, files, lines in rows}


def test_the_one_path_is_in_the_tree() -> None:
    lines = the_product()
    assert all(any(name.startswith(part) for name in lines) for part in (*ONE_PATH, *HANGING))


def test_no_room_exceeds_its_budget() -> None:
    limits, found = budgets(), rooms()
    assert found.keys() - limits.keys() <= {CORE}  # its limit is a goal so far
    assert limits.keys() <= found.keys()
    sizes = {room: (len(found[room]), sum(found[room])) for room in limits}
    over = {
        room: (files, lines)
        for room, (files, lines) in sizes.items()
        if files > limits[room][0] or lines > (limits[room][1] or lines)
    }
    assert over == {}


def test_capability_off_the_path_is_imported_by_core_and_actor_alone() -> None:
    knows = {
        name
        for name in on_the_path()
        if any(to.startswith(HANGING) for to in imported()[name]) and Path(name).stem not in ("core", "actor")
    }
    assert knows == KNOWS_HANGING


@pytest.mark.parametrize("path", DELETABLE)
def test_a_deletable_folder_is_named_by_its_table_alone(path: str) -> None:
    outside = [s for s in product() if s.name.split("/")[0] in PRODUCT and not s.name.startswith(path)]
    assert {s.name for s in outside if any(to.startswith(path) for to in imported()[s.name])} == set()
    assert {s.name for s in outside if _mentions(s, path)} == {DELETABLE[path]}
    lines = (ROOT / DELETABLE[path]).read_text().splitlines()
    found = [line.strip() for line in lines if names(line, path)]
    assert len(found) == LINES.get(path, 1)
    assert [line for line in found if not OF_TABLE.fullmatch(line)] == []


def _mentions(source: Source, path: str) -> bool:
    """Whether a file names a module of `path` in a string that is no docstring."""
    module = module_of(path)
    return any(
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and " " not in node.value
        and f"{node.value.replace(':', '.')}.".startswith(f"{module}.")
        for node in source.nodes
    )


def _part(service: str, name: str) -> str:
    return name.removeprefix(f"{service}/").partition("/")[0].removesuffix(".py")
