"""Runs the product from a copy of the tree that lacks one folder.

    python -m support.without_folder MODEL        imports every entry point once, for their packages
      stdin   services/gateway/ services/launcher/serve.py        one case a line: a folder and its registry
      stdout  ""  or what failed

Each case is a fork of this process, which forgets the modules of the product and imports them from the copy:
all files of the product but those of the folder, and the registry without the lines that name the folder.
Then one request goes through tokenizer, scheduler, simulated engine and detokenizer over a memory bus.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

from support.source_tree import PRODUCT, ROOT

# A folder, or a file that is a whole capability; and the table in whose lines it stands.
DELETABLE = {
    "services/gateway/": "services/launcher/serve.py",
    "services/keeper/": "services/launcher/serve.py",
    "services/kv_offload/": "services/launcher/serve.py",
    "services/executor/cuda/": "services/executor/engine.py",
    "services/executor/cpu/autotune.py": "services/executor/engine.py",
    "services/executor/cpu/compiled.py": "services/executor/engine.py",
    "services/executor/adapters/": "services/executor/engine.py",
    "services/executor/encoder/": "services/executor/build.py",
    "services/executor/group/": "services/executor/build.py",
    "services/executor/sampling/grammar_matchers.py": "services/executor/sampling/grammar.py",
    "services/executor/speculation/": "services/executor/engine.py",
    "services/executor/quantised/": "services/executor/checkpoint/stored.py",
    "services/scheduler/sessions/": "services/scheduler/core.py",
    "services/scheduler/speculation.py": "services/scheduler/step_planner.py",
    "services/scheduler/adapters.py": "services/scheduler/load_shedding.py",
    "services/tokenizer/adapters.py": "services/tokenizer/actor.py",
    "services/tokenizer/aliases.py": "services/tokenizer/actor.py",
    "services/tokenizer/standby.py": "services/tokenizer/actor.py",
    "services/tokenizer/structured_output.py": "services/tokenizer/prepare.py",
    "services/tokenizer/template_probe.py": "services/tokenizer/chat_template.py",
    "services/detokenizer/durable/": "services/detokenizer/actor.py",
    "services/scheduler/reports/event_log.py": "services/scheduler/actor.py",
    "services/launcher/host_agent.py": "services/launcher/up.py",
    "services/launcher/commands/auth.py": "services/launcher/cli.py",
    "services/launcher/commands/completion.py": "services/launcher/cli.py",
    "services/launcher/commands/logs.py": "services/launcher/cli.py",
    "services/launcher/commands/record.py": "services/launcher/cli.py",
    "services/launcher/commands/status.py": "services/launcher/cli.py",
    "services/launcher/commands/adapter.py": "services/launcher/cli.py",
    "services/launcher/commands/batch.py": "services/launcher/cli.py",
    "services/launcher/commands/chat.py": "services/launcher/cli.py",
    "services/launcher/commands/doctor.py": "services/launcher/cli.py",
    "services/launcher/commands/kv.py": "services/launcher/cli.py",
    "services/launcher/commands/model.py": "services/launcher/cli.py",
    "services/launcher/commands/sessions.py": "services/launcher/cli.py",
    "services/launcher/commands/submit.py": "services/launcher/cli.py",
    "services/launcher/commands/trace.py": "services/launcher/cli.py",
    "shared/telemetry/otel_sdk.py": "shared/telemetry/export.py",
    "kernels/attention/hopper.py": "kernels/attention/prefill.py",
    "services/gateway/dialects/adapters.py": "services/gateway/app.py",
    "services/gateway/dialects/anthropic.py": "services/gateway/app.py",
    "services/gateway/dialects/later.py": "services/gateway/app.py",
    "services/gateway/dialects/ollama.py": "services/gateway/app.py",
    "services/gateway/dialects/responses.py": "services/gateway/app.py",
    "services/gateway/batches.py": "services/gateway/app.py",
    "services/gateway/page.py": "services/gateway/app.py",
    "services/gateway/sessions.py": "services/gateway/app.py",
    "services/keeper/batches/": "services/keeper/parts.py",
    "services/keeper/forwarding.py": "services/keeper/parts.py",
    "services/keeper/webhooks.py": "services/keeper/parts.py",
    "services/kv_offload/peers/nixl.py": "services/kv_offload/peers/wire.py",
    "services/kv_offload/backends/folder.py": "services/kv_offload/backends/interface.py",
    "services/kv_offload/backends/lmcache.py": "services/kv_offload/backends/interface.py",
}

LINES = {  # a first number of threads and the next; one a format, and one a dtype that keeps it; one a
    # command, and that for mistyped ones
    "services/executor/adapters/": 5, "services/executor/cpu/autotune.py": 2,
    "services/executor/quantised/": 6,
    "services/launcher/commands/chat.py": 2, "services/launcher/commands/completion.py": 2,
    "services/launcher/commands/record.py": 3, "services/launcher/commands/status.py": 3,
    "services/launcher/commands/submit.py": 4, "services/tokenizer/template_probe.py": 2,
}  # fmt: skip

PIPELINE = ("scheduler", "detokenizer", "executor", "tokenizer")
BYTECODE = f".{sys.implementation.cache_tag}.pyc"


def module_of(path: str) -> str:
    """The module or package of a file or folder of the tree."""
    return path.rstrip("/").removesuffix(".py").replace("/", ".")


def names(line: str, path: str) -> bool:
    """Whether a line of a table names `path`, or a module in it, by a string `module:function`."""
    module = module_of(path)
    return f'"{module}:' in line or f'"{module}.' in line


def copy_without(path: str, registry: str, to: Path) -> None:
    """Copy the product but the file or folder `path` and the lines of `registry` that name it."""
    for source in (each for room in PRODUCT for each in (ROOT / room).rglob("*") if each.is_file()):
        name = str(source.relative_to(ROOT))
        if source.suffix == ".pyc" or name.startswith(path):
            continue
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name == registry:
            lines = source.read_text().splitlines(keepends=True)
            target.write_text("".join(line for line in lines if not names(line, path)))
        else:
            shutil.copy2(source, target)
            compiled = source.parent / "__pycache__" / f"{source.stem}{BYTECODE}"
            if compiled.exists():  # of the same time and size: the copy is not compiled again
                (target.parent / "__pycache__").mkdir(exist_ok=True)
                shutil.copy2(compiled, target.parent / "__pycache__" / compiled.name)


def import_all() -> None:
    """Import every entry point: the services, the command line with its commands, the client library."""
    from services.launcher import cli, serve

    for kind in serve.BUILDERS:
        serve.builder(kind)
    cli._parser(cli._ALL)
    importlib.import_module("headrace.client")


async def smoke(model: str) -> None:
    """One request through the actors. Raises AssertionError for a wrong answer."""
    from services.launcher.serve import builder
    from shared.actor.runtime import Runtime
    from shared.client.client import Client
    from shared.config import load
    from support.memory_bus import MemoryBroker

    flags = {"model": model, "backend": "sim", "sim": "step=200", "l1": "off", "fleet": "smoke"}
    settings, broker, runtimes = load(flags=flags).settings, MemoryBroker(), []
    for kind in PIPELINE:
        actor = builder(kind)(settings)
        runtimes.append(Runtime(actor, broker.connect(), "smoke", kind, settings.host_id))
        await runtimes[-1].start()
    scheduler = runtimes[0].actor
    async with asyncio.timeout(20):
        while not scheduler.status()["executors"]:
            await asyncio.sleep(0.002)
        client = await Client.open(broker.connect())
        body = {
            "model": Path(model).stem,
            "prompt": "The quick brown",
            "max_tokens": 5,
            "seed": 7,
            "ignore_eos": True,
        }
        answer = await client.complete(body)
    assert answer["usage"]["completion_tokens"] == 5, answer
    assert answer["choices"][0]["finish_reason"] == "length", answer
    for runtime in reversed(runtimes):
        await runtime.finish(5)
        assert runtime.failure is None


def run_case(path: str, registry: str, model: str) -> None:
    """Import all from a copy without `path`, and answer a request."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in (*PRODUCT, "support"):
            del sys.modules[name]
    with tempfile.TemporaryDirectory() as folder:
        copy_without(path, registry, Path(folder))
        sys.path[:] = [folder, *(each for each in sys.path if Path(each or ".").resolve() != ROOT)]
        sys.meta_path[:] = [each for each in sys.meta_path if not _is_editable(each)]
        os.chdir(folder)
        importlib.invalidate_caches()
        import_all()
        assert Path(sys.modules["services.launcher.cli"].__file__ or "").is_relative_to(folder)
        asyncio.run(smoke(model))


def _is_editable(finder: object) -> bool:
    """Whether an importer finds the tree of an editable installation."""
    return getattr(finder, "__module__", "").startswith("__editable__")


def main(model: str) -> None:
    """Serve cases until stdin ends."""
    import_all()
    gc.freeze()
    gc.disable()  # a case ends before garbage counts
    for line in sys.stdin:
        read, write = os.pipe()
        if not (child := os.fork()):
            trace = ""
            try:
                path, registry = line.split()
                run_case(path, registry, model)
            except BaseException:  # noqa: BLE001 - the test prints it
                trace = traceback.format_exc()
            os.write(write, trace[-60_000:].encode())
            os._exit(0)
        os.close(write)
        with open(read) as answer:
            print(repr(answer.read()), flush=True)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1])
