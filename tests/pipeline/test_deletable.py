"""The product works without any one of its deletable folders."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from support.source_tree import ROOT
from support.text_models import write_bpe_gguf
from support.without_folder import DELETABLE

Without = Callable[[str, str], str]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Without]:
    """Runs the product without a folder; returns what failed."""
    model = write_bpe_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    command = [sys.executable, "-m", "support.without_folder", str(model)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    with subprocess.Popen(
        command, env=env, cwd=model.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        to, answers = server.stdin, server.stdout

        def run(path: str, registry: str) -> str:
            print(path, registry, file=to, flush=True)
            return str(ast.literal_eval(answers.readline()))

        yield run
        to.close()


@pytest.mark.parametrize("path", DELETABLE)
def test_the_rest_works_without_a_deletable_folder(path: str, without: Without) -> None:
    assert without(path, DELETABLE[path]) == ""
