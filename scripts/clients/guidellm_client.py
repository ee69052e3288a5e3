# pip: guidellm
"""guidellm: a short benchmark of its own, with prompts from a file: its synthetic ones need a tokenizer from a hub."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPTS = ("What is NATS?", "Name a river.", "Count to five.", "What is a queue?")
FORMATS = ("/v1/chat/completions", "/v1/completions")

with tempfile.TemporaryDirectory() as folder:
    data = Path(folder) / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": each, "output_tokens_count": 8}) + "\n" for each in PROMPTS)
    )
    for number, form in enumerate(FORMATS):
        report = Path(folder) / f"{number}.json"
        backend = f"kind=openai_http,target={os.environ['ROOT_URL']},model={os.environ['MODEL']},request_format={form}"
        command = [
            str(Path(sys.executable).parent / "guidellm"), "run", "--backend", backend, "--profile", "kind=synchronous",
            "--constraint", f"kind=max_requests,count={len(PROMPTS)}", "--data", f"kind=json_file,path={data}",
            "--output", f"kind=json,path={report}", "--disable-console",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
        metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
        assert metrics["request_totals"]["successful"] == len(PROMPTS), metrics["request_totals"]
        assert metrics["request_totals"]["errored"] == 0
