# pip: httpx
"""The requests of `vllm bench serve` (vllm/benchmarks/lib/endpoint_request_func.py), by their shape."""

import json
import os

import httpx

base, model = os.environ["BASE_URL"], os.environ["MODEL"]
completions = {
    "model": model,
    "prompt": "Hello, " * 40,
    "temperature": 0.0,
    "repetition_penalty": 1.0,
    "max_tokens": 16,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}
chat = {
    "model": model,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    "max_completion_tokens": 16,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "temperature": 0.0,
}
for path, body in (("completions", completions), ("chat/completions", chat)):
    usage, texts = None, 0
    with httpx.stream(
        "POST", f"{base}/{path}", json=body, headers={"Authorization": "Bearer any"}, timeout=60
    ) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                data = json.loads(line[6:])
                texts += bool(data.get("choices"))
                usage = data.get("usage") or usage
    assert texts > 1, path
    assert usage["completion_tokens"] == 16, path
