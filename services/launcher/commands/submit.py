"""`headrace submit` stores a durable request and prints its id; `headrace result` prints its answer.

`headrace attach` prints the answer of a request while it is made, a durable one or any that runs.

`headrace request` sends one request: JSON in, JSON out, with --stream one line for each frame.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from services.launcher.console import AGAIN, add_sampling_flags, dim, load, options_of
from services.launcher.session import Target, connected, find_target
from shared.client.client import Client
from shared.client.follow import ENDED, text_of
from shared.errors import NO_TEMPLATE, BadRequest, Unavailable, UnknownModel, UnknownRequest
from shared.nats import subjects
from shared.nats.interface import NoResponders, RequestTimeout

RESULT_POLL_S = 2.0  # between two looks of `--wait`, for news that were missed
TRIES, RETRY_S = 13, 0.25  # three seconds: the keeper is the last service that `up` starts
NO_KEEPER = (
    "no keeper answers: is `headrace up` running, without `--no-durable`? `headrace status` shows what runs"
)

Body = dict[str, Any]


async def submit(target: Target, body: Body) -> None:
    """Store `body` and print its id. Raises the error of the request, Unavailable without a keeper."""
    model = str(body.get("model") or target.model)
    async with connected(target.nats_url) as bus:
        client = await Client.open(bus, target.tenant)
        subject = subjects.submit(target.tenant, model)
        try:
            answer = await _asked(client, subject, body)
        except BadRequest as error:
            if error.message != NO_TEMPLATE or len(body["messages"]) > 1:
                raise
            (question,) = body.pop("messages")
            answer = await _asked(client, subject, {**body, "prompt": question["content"]})
    print(answer["id"])


async def result(target: Target, request_id: str, *, wait: bool, as_json: bool) -> int:
    """Print the answer of a request that has ended, else its state on stderr. Returns the exit status, 0 for
    an answer. With `wait`, returns when it has ended, also after the fleet was away. Raises the error of a
    failed request, UnknownRequest, Unavailable without a keeper."""
    async with connected(target.nats_url) as bus:
        client, news = await Client.open(bus, target.tenant), asyncio.Event()
        await bus.subscribe(subjects.done(target.tenant, request_id), lambda _: news.set())
        while True:
            found: Body = {"status": "unknown"}
            try:
                found = await _asked(client, subjects.result(target.tenant, request_id))
            except (Unavailable, RequestTimeout):
                if not wait:
                    raise
            except UnknownModel as error:  # the 404 of any other name
                raise UnknownRequest(error.message) from None
            if found["status"] in ENDED or not wait:
                return _shown(found, as_json=as_json)
            with suppress(TimeoutError):
                async with asyncio.timeout(RESULT_POLL_S):
                    await news.wait()


async def _asked(client: Client, subject: str, body: Mapping[str, Any] | None = None) -> Body:
    """The answer of a keeper, which may have started just now."""
    for left in reversed(range(TRIES)):
        with suppress(NoResponders):
            return await client.request(subject, body)
        await asyncio.sleep(RETRY_S if left else 0)
    raise Unavailable(NO_KEEPER)


def _shown(found: Body, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(found, ensure_ascii=False, indent=2))
    elif "answer" in found:
        print("\n".join(_whole(choice) for choice in found["answer"]["choices"]))
    else:
        print(found["status"], file=sys.stderr)
    return 0 if "answer" in found else 1


def _whole(choice: Mapping[str, Any]) -> str:
    """The text of a choice; of one that calls functions, the message as JSON."""
    message = choice.get("message")
    return text_of(choice) or (json.dumps(message, ensure_ascii=False) if message else "")


async def attach(target: Target, request_id: str) -> None:
    """Print the first choice as it comes, the others at the end. A line on stderr marks a text that starts
    over. Raises the error of the request, UnknownRequest, Moved for another reader."""
    texts: dict[int, str] = {}
    async with connected(target.nats_url) as bus:
        client = await Client.open(bus, target.tenant)
        try:
            async with aclosing(client.follow(request_id)) as frames:
                async for frame in frames:
                    if frame["type"] == "accepted" and texts:
                        _end(texts)
                        print(dim(AGAIN), file=sys.stderr, flush=True)
                        texts.clear()
                    for choice in frame["choices"] if frame["type"] == "delta" else ():
                        index, text = int(choice["index"]), text_of(choice)
                        texts[index] = texts.get(index, "") + text
                        if index == 0:
                            print(text, end="", flush=True)
        finally:
            _end(texts)
    for index in sorted(texts.keys() - {0}):
        print(texts[index])


def _end(texts: dict[int, str]) -> None:
    """End the line of the first choice."""
    if texts.get(0):
        print(flush=True)


def read_body(text: str | None, file: Path | None) -> dict[str, Any]:
    """The request from the argument, a file, or stdin (if neither is given, or `-`). Raises BadRequest."""
    if text is not None and file is not None:
        raise BadRequest("give the request as an argument or with --file, not both")
    if file is not None and str(file) != "-":
        try:
            text = file.read_text()
        except OSError as error:
            raise BadRequest(f"{file} cannot be read: {error.strerror}") from None
    elif text is None or text == "-":
        text = sys.stdin.read()
    try:
        body = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the request is not a JSON object like " + '{"prompt": "Hello"}')
    return body


async def request(target: Target, body: dict[str, Any], *, stream: bool, timeout_s: float) -> None:
    """Send `body` and print the answer. Raises the request's error. An interrupt cancels the request."""
    filled = {"model": target.model, **body}
    async with connected(target.nats_url) as bus:
        client = await Client.open(bus, target.tenant)
        if not (stream or filled.get("stream")):
            _print(await client.complete(filled, timeout_s=timeout_s), indent=2)
            return
        async with aclosing(client.stream(filled, timeout_s=timeout_s)) as frames:
            async for frame in frames:
                _print(frame)


def _print(body: dict[str, Any], indent: int | None = None) -> None:
    print(json.dumps(body, ensure_ascii=False, indent=indent), flush=True)


def submit_command(parser: argparse.ArgumentParser) -> None:
    """The arguments of `headrace submit`."""
    add = parser.add_argument
    add("prompt", nargs="?", help="the question; or a request with --file")
    add("-f", "--file", type=Path, help="read a JSON request from a file, - for stdin")
    add("--id", help="an id of your choice: the same request is stored once under it")
    add("--webhook", metavar="URL", help="gets a signed event when it has ended")
    add("--checkpoints", action="store_true", help="keep its tokens: it goes on after the loss of everything")
    add_sampling_flags(parser, "what fits")
    parser.set_defaults(run=_on_submit)


def _on_submit(given: argparse.Namespace) -> None:
    if (given.prompt is None) == (given.file is None):
        raise BadRequest("give the question as an argument, or a request with --file")
    system = [{"role": "system", "content": given.system}] if given.system else []
    question = {"role": "user", "content": given.prompt}
    body = {"messages": [*system, question], **options_of(given)}
    if given.file is not None:
        body = read_body(None, given.file)
    if given.id is not None:
        body["request_id"] = given.id
    if given.webhook is not None:
        body["webhook"] = given.webhook
    if given.checkpoints:
        body["durable"] = "tokens"
    asyncio.run(submit(find_target(load(given), wait=True), body))


def result_command(parser: argparse.ArgumentParser) -> None:
    """The arguments of `headrace result`."""
    add = parser.add_argument
    add("id", type=_request_id, help="the id that `submit` has printed")
    add("--wait", action="store_true", help="wait until it has ended")
    add("--json", action="store_true", help="everything, as JSON")
    parser.set_defaults(run=_on_result)


def _on_result(given: argparse.Namespace) -> int:
    target = find_target(load(given))
    return asyncio.run(result(target, given.id, wait=given.wait, as_json=given.json))


def attach_command(parser: argparse.ArgumentParser) -> None:
    """The arguments of `headrace attach`."""
    parser.add_argument("id", type=_request_id, help="of a durable request, or of any that runs")
    parser.set_defaults(run=lambda given: asyncio.run(attach(find_target(load(given)), given.id)))


def request_command(parser: argparse.ArgumentParser) -> None:
    """The arguments of `headrace request`."""
    add = parser.add_argument
    add("body", nargs="?", help='like {"prompt": "Hello"}; default: from stdin')
    add("-f", "--file", type=Path, help="read the request from a file")
    add("--stream", action="store_true", help="print each frame as a JSON line")
    parser.set_defaults(run=_on_request)


def _on_request(given: argparse.Namespace) -> None:
    body = read_body(given.body, given.file)
    loaded = load(given)
    timeout_s = loaded.settings.request_timeout_s
    asyncio.run(request(find_target(loaded, wait=True), body, stream=given.stream, timeout_s=timeout_s))


def _request_id(text: str) -> str:
    """`text`, as argparse takes an argument. Raises ValueError for an empty one."""
    if not text:
        raise ValueError
    return text
