# pip: httpx
"""The calls of open-webui (backend/open_webui/routers/openai.py, ollama.py) to its two kinds of servers."""

import json
import os

import httpx

base, root, model = os.environ["BASE_URL"], os.environ["ROOT_URL"], os.environ["MODEL"]
headers = {
    "Authorization": "Bearer any",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "someone",
}
with httpx.Client(headers=headers, timeout=60) as http:
    assert model in [each["id"] for each in http.get(f"{base}/models").json()["data"]]
    asked = {
        "stream": True,
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 12,
        "stream_options": {"include_usage": True},
    }
    lines = [line for line in http.post(f"{base}/chat/completions", json=asked).text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    title = {
        "model": model,
        "messages": [{"role": "user", "content": "A title of three words"}],
        "stream": False,
        "max_completion_tokens": 12,
    }
    assert http.post(f"{base}/chat/completions", json=title).json()["choices"][0]["message"]["content"]
    tags = http.get(f"{root}/api/tags").json()["models"]
    assert model in [each["model"].removesuffix(":latest") for each in tags]
    assert http.get(f"{root}/api/version").json()["version"]
    name = tags[0]["model"]
    body = {
        "model": name,
        "messages": [{"role": "user", "content": "Hello"}],
        "options": {"num_predict": 8},
        "stream": True,
    }
    parts = [json.loads(line) for line in http.post(f"{root}/api/chat", json=body).text.splitlines()]
    assert parts[-1]["done"] is True
