"""A test that fails leaves no process, and does not wait for one."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from support.children import ended_on_failure

FOREVER = [sys.executable, "-S", "-c", "import signal; signal.pause()"]


def test_a_failing_test_ends_what_it_has_started() -> None:
    with subprocess.Popen(FOREVER) as anothers:
        with pytest.raises(ZeroDivisionError), ended_on_failure():
            bare = subprocess.Popen(FOREVER)
            with subprocess.Popen(FOREVER) as awaited:
                raise ZeroDivisionError
        assert [bare.wait(30), awaited.wait(30)] == [-signal.SIGKILL] * 2
        assert anothers.poll() is None
        with ended_on_failure():
            going_on = subprocess.Popen(FOREVER)
        assert going_on.poll() is None
        for process in (going_on, anothers):
            process.kill()
    going_on.wait(30)
