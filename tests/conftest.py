"""Settings of all tests: one torch thread (two on a shared machine are several times slower)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
