"""`python -m tests.lab.skewed MODEL ...`: a peer (`python -m peer`) on a machine whose clock is an hour ahead."""

from __future__ import annotations

import time

AHEAD_S = 3600.0

if __name__ == "__main__":
    right = time.time
    time.time = lambda: right() + AHEAD_S
    from peer.__main__ import main

    main()
