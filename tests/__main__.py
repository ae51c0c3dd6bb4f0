"""`python -m tests` (`make test`): all tests, in two runs side by side, since neither keeps two cores busy.

Tests that start processes (and a few others, so that both runs take as long) have the terminal; the output of all
others follows when they are done. To run some tests only, call pytest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

FIRST = "processes or beside"


def main() -> int:
    pytest = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    with tempfile.TemporaryFile() as output:
        others = subprocess.Popen(
            [*pytest, "-m", f"not ({FIRST})"], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = subprocess.run([*pytest, "-m", FIRST], check=False).returncode
            code = others.wait() or code
        finally:
            if others.poll() is None:
                os.killpg(others.pid, signal.SIGKILL)
                others.wait()
            output.seek(0)
            print(output.read().decode(errors="replace"), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
