"""Starts a daemon, which loads the model once, and uses it from two programs."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quire import LLM, SamplingParams

OTHER_PROGRAM = """
import sys
from quire import LLM, SamplingParams

with LLM(engine=sys.argv[1]) as llm:
    [output] = llm.generate("One day", SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    print("another program:", output.prompt + output.outputs[0].text)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "engine.sock"
        address = f"ipc://{socket}"
        daemon = subprocess.Popen([sys.executable, "-m", "quire", "engine", "--listen", address])
        try:
            while not socket.exists():
                if daemon.poll() is not None:
                    raise SystemExit(f"the daemon ended with exit code {daemon.returncode}")
                time.sleep(0.1)
            with LLM(engine=address) as llm:
                params = SamplingParams(temperature=0, max_tokens=16)
                [output] = llm.generate("Once upon a time", params, use_tqdm=False)
                print("this program:", output.prompt + output.outputs[0].text)
                subprocess.run([sys.executable, "-c", OTHER_PROGRAM, address], check=True)
        finally:
            daemon.terminate()  # SIGTERM: what runs may finish
            daemon.wait(timeout=30)


if __name__ == "__main__":
    main()
