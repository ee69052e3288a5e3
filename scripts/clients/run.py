"""By hand: unmodified clients of other projects against `headrace up` with the default model.

    python scripts/clients/run.py [NAME ...]

Each client has a script here and a virtual environment of its own with the packages that its first line names
(`# pip: …`); openai-node needs `npm`. A script gets BASE_URL, MODEL and ROOT_URL, and fails by an
exception. The table of results goes to stdout, with the versions that were installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENVS = Path(os.environ.get("CLIENT_VENVS", "/tmp/headrace-clients"))
LIMIT_S = 600  # of one client, with its installation


def up(folder: str, *options: str) -> tuple[subprocess.Popen[str], str]:
    """A ready `headrace up` of the default model or with these options, and the root of its URLs."""
    command = [
        sys.executable,
        "-m",
        "services.launcher.cli",
        "up",
        "--http",
        "127.0.0.1:0",
        "--fleet",
        "clients",
        *options,
    ]
    log = open(Path(folder) / "up.log", "w")  # noqa: SIM115 - as long as the process
    env = {**os.environ, "XDG_STATE_HOME": folder}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "OpenAI API" in line:
            return process, line.split()[-1].removesuffix("/v1")
    raise SystemExit("headrace up ended")


def packages_of(script: Path) -> list[str]:
    """The packages that a script needs."""
    return script.read_text().partition("\n")[0].partition("pip:")[2].split()


def interpreter(script: Path, packages: list[str]) -> Path:
    """A Python with these packages."""
    venv = VENVS / script.stem
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True, timeout=LIMIT_S)
    return python


def versions(python: Path, packages: list[str]) -> str:
    """Names and versions of the packages as installed."""
    names = [package.partition("[")[0].partition("=")[0] for package in packages]
    code = "import sys; from importlib.metadata import version; print(*(n + ' ' + version(n) for n in sys.argv[1:]), sep=', ')"
    return subprocess.run(
        [python, "-c", code, *names], capture_output=True, text=True, check=True
    ).stdout.strip()


def run(script: Path, url: str) -> tuple[bool, str]:
    """Whether a client works, and its versions or its last line."""
    packages = packages_of(script)
    env = {
        **os.environ, "BASE_URL": f"{url}/v1", "ROOT_URL": url, "MODEL": "smollm2-135m-instruct",
        "OPENAI_API_KEY": "any", "OPENAI_BASE_URL": f"{url}/v1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    try:
        if script.suffix == ".mjs":
            folder = VENVS / script.stem
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(["npm", "install", "--silent", *packages], cwd=folder, check=True, timeout=LIMIT_S)
            (folder / script.name).write_text(script.read_text())
            command, shown = ["node", str(folder / script.name)], " ".join(packages)
        else:
            python = interpreter(script, packages)
            command, shown = [str(python), str(script)], versions(python, packages)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (subprocess.SubprocessError, OSError) as error:
        return False, str(error)
    if done.returncode:
        sys.stderr.write(f"--- {script.stem}\n{done.stdout[-2000:]}{done.stderr[-3000:]}\n")
        return False, (done.stderr.strip().splitlines() or ["no output"])[-1]
    return True, shown


def main() -> int:
    """Run all clients, or those named; exit status 1 if one fails."""
    wanted = sys.argv[1:]
    scripts = sorted(
        p for p in HERE.iterdir() if p.suffix in (".py", ".mjs") and p.name not in ("run.py", "agents.py")
    )
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        process, url = up(folder)
        try:
            for script in scripts:
                if wanted and script.stem not in wanted:
                    continue
                started_s = time.monotonic()
                works, shown = run(script, url)
                failed += not works
                took_s = time.monotonic() - started_s
                print(
                    f"{script.stem:<18} {'works' if works else 'FAILS':<6} {took_s:6.1f} s  {shown}",
                    flush=True,
                )
        finally:
            process.terminate()
            process.wait(60)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
