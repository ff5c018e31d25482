"""An engine process on a fake GPU: `python -P -m quire.tests.fake_gpu_engine`."""

import sys

from quire.core.engine_proc import leave, main
from quire.tests.fake_gpu import fake_gpu

COMMAND = [sys.executable, "-P", "-m", "quire.tests.fake_gpu_engine"]

if __name__ == "__main__":
    with fake_gpu():
        leave(main())
