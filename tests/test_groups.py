"""Tests of one group run in one worker: browsers share a server, and claims of one experiment their runs.

Where the runner does not see the groups, nothing fails but the time.
"""

import os
import subprocess
import sys

SUITE = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(6))
@pytest.mark.xdist_group("together")
def test_grouped(number):
    pathlib.Path(os.environ["PYTEST_XDIST_WORKER"]).touch()
"""


def test_a_group_stays_in_one_worker(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE, "utf-8")
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert len(list(tmp_path.glob("gw*"))) == 1
