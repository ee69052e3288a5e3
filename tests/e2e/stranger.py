"""A client that knows only nats-py and the README: it shares no code with the project.

    python stranger.py URL chat | stream | cancel | many N

Prints one JSON line. A missing, doubled or late frame ends it with an assertion.
"""

from __future__ import annotations

import asyncio
import json
import sys

import nats

SUBJECT = "headrace.v1.generate.public.smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


async def chat(nc):
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 64}
    reply = await nc.request(SUBJECT, json.dumps(body).encode(), timeout=60)
    return json.loads(reply.data)


async def stream(nc, body, on_frame=None):
    """All frames of an answer; numbers must be 0, 1, 2, ... and the last one carries Headrace-End."""
    inbox, frames, ended = nc.new_inbox(), [], asyncio.Event()

    async def on_message(message):
        frame = json.loads(message.data)
        frames.append(frame)
        if on_frame is not None:
            await on_frame(frame)
        if (message.headers or {}).get("Headrace-End") == "1":
            ended.set()

    subscription = await nc.subscribe(inbox, cb=on_message)
    await nc.publish(SUBJECT, json.dumps({**body, "stream": True}).encode(), reply=inbox)
    await asyncio.wait_for(ended.wait(), 300)
    await subscription.unsubscribe()
    assert [f["frame"] for f in frames] == list(range(len(frames))), "a frame is missing or out of order"
    return frames


def text_of(frames):
    """Text and token count of choice 0; token indexes must follow each other."""
    text, tokens = "", 0
    for frame in frames:
        for choice in frame.get("choices", []):
            delta = choice.get("delta") or {}
            if "first" in delta:
                assert delta["first"] == tokens, "a token is missing or doubled"
                tokens += delta["count"]
            text += delta.get("content") or ""
    return text, tokens


async def cancel(nc):
    body = {"messages": QUESTION, "max_tokens": 7000, "ignore_eos": True, "request_id": "stranger-cancels"}

    async def on_frame(frame):
        if frame["type"] == "delta":
            await nc.publish("headrace.v1.cancel.public.stranger-cancels", b"")

    frames = await stream(nc, body, on_frame)
    return {"last": frames[-1]["type"], "code": frames[-1]["error"]["code"], "frames": len(frames)}


async def many(nc, n):
    bodies = [
        {"messages": QUESTION, "max_tokens": 24, "ignore_eos": True, "seed": i, "request_id": f"many-{i}"}
        for i in range(n)
    ]
    answers = await asyncio.gather(*(stream(nc, body) for body in bodies))
    assert all(frames[-1]["type"] == "done" for frames in answers)
    tokens = [frames[-1]["usage"]["completion_tokens"] for frames in answers]
    return {"streams": n, "tokens": sum(tokens), "texts": len({text_of(f)[0] for f in answers})}


async def main(url, what, *rest):
    nc = await nats.connect(url)
    if what == "chat":
        result = await chat(nc)
    elif what == "stream":
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 12}
        frames = await stream(nc, body)
        result = {
            "text": text_of(frames)[0],
            "types": [f["type"] for f in frames],
            "usage": frames[-1]["usage"],
        }
    elif what == "cancel":
        result = await cancel(nc)
    else:
        result = await many(nc, int(rest[0]))
    print(json.dumps(result))
    await nc.drain()


asyncio.run(main(*sys.argv[1:]))
