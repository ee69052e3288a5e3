"""`headrace up` with a random model, as the stages start it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from loadtest.fleet import MODEL, Fleet, fleet
from services.launcher.joining import VISIBLE


def up(
    folder: str,
    *flags: str,
    device: str,
    executors: int = 1,
    l1_mib: int = 0,
    gpus: str = "",
    logs: str = "",
) -> AbstractAsyncContextManager[Fleet]:
    """A fleet of the model in `folder`; `gpus`: those that it sees, all without. Its log goes to a
    file in the folder `logs`."""
    model = (
        "--backend",
        "dummy",
        "--model",
        folder,
        "--model-name",
        MODEL,
        "--device",
        device,
        "--no-durable",
    )
    name = f"{device.replace('/', '_')}-{executors}-{'deterministic' in ' '.join(flags):d}.log"
    log = str(Path(logs) / name) if logs else ""
    env = {VISIBLE: gpus} if gpus else None
    return fleet(*model, "--device", device, *flags, env=env, executors=executors, l1_mib=l1_mib, log=log)
