# pip: guidellm
"""guidellm: a short benchmark of its own against our API."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    command = [
        str(Path(sys.executable).parent / "guidellm"), "benchmark", "run", "--target", os.environ["ROOT_URL"],
        "--model", os.environ["MODEL"], "--profile", "synchronous", "--max-requests", "3",
        "--data", "prompt_tokens=32,output_tokens=8", "--processor", "HuggingFaceTB/SmolLM2-135M-Instruct", "--output-dir", folder,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
