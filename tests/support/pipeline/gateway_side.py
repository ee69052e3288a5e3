"""A gateway beside the five actors of a pipeline, in the same event loop, serving real HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.pipeline.five_actors import Pipeline

from services.gateway.actor import GatewayActor
from services.gateway.visitors import Keys
from shared.actor.runtime import Runtime

MODEL = "smollm2-135m-instruct"


async def add_gateway(
    pipeline: Pipeline, name: str = "gateway-1", keys: Path | None = None, **more: Any
) -> str:
    """Start one; its URL."""
    actor = GatewayActor(("127.0.0.1", 0), Keys(str(keys) if keys else ""), timeout_s=300, **more)
    runtime = Runtime(
        actor, await pipeline.connect(), pipeline.settings.fleet, name, heartbeat_interval_us=50_000
    )
    pipeline.runtimes[name] = runtime
    await runtime.start()
    return str(actor.status()["url"])


async def healthy(pipeline: Pipeline, name: str = "gateway-1") -> None:
    """Return when a request would succeed."""
    await pipeline.until(lambda: gateway_status(pipeline, name)["health"] == "ok")


def gateway_status(pipeline: Pipeline, name: str = "gateway-1") -> dict[str, Any]:
    return pipeline.runtimes[name].actor.status()


async def remove_gateway(pipeline: Pipeline, name: str = "gateway-1") -> None:
    """Drain one."""
    runtime = pipeline.runtimes.pop(name)
    await runtime.finish(5)
    assert runtime.failure is None
