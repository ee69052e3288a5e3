"""The client library: requests to a fleet over NATS, with the fields of the OpenAI API and without HTTP.

    from headrace import Client

    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hello"}]}
    with Client("nats://127.0.0.1:4222") as client:
        print(client.complete(body)["choices"][0]["message"]["content"])
        for frame in client.stream(body):
            print(frame["type"])

A program with an event loop uses `connect`, which gives an `AsyncClient`: `async with connect(url) as c`,
then `await c.complete(body)`. Both raise HeadraceError. Fields and frames: docs/reference/api.md.
"""

try:
    from shared.client.client import Client as AsyncClient
    from shared.errors import HeadraceError
    from shared.processes import foreign_kernels
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "shared":
        raise
    raise ImportError(
        f"a package `shared` that is not Headrace's comes first on sys.path ({error}): give that folder "
        "another name, or start Python elsewhere"
    ) from error

if _why := foreign_kernels():
    raise ImportError(_why)

from headrace.client import Client, connect

__all__ = ["AsyncClient", "Client", "HeadraceError", "connect"]
