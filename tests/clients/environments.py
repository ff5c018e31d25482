"""Third-party clients, each in its own virtual environment, run against a server.

    python tests/clients/environments.py install [NAME ...]    create the environments
    python tests/clients/environments.py table [NAME ...]      run the installed clients
    pytest -m clients                                          run them as tests

The environments are created under $QUIRE_CLIENTS (default: .clients in this directory). `table`
prints the results as a Markdown table.
"""

import ast
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

HERE = Path(__file__).resolve().parent
SERVER_FLAGS = ("--served-model-name", "quire", "--reasoning-parser", "none")
TIMEOUT_S = 840  # that of ray_ranks takes half of it on a busy machine


@dataclass(frozen=True)
class Client:
    """`script` runs in the environment called `name`, which has `requirement` installed: packages
    of PyPI, or after npm: one of npm. The server has SERVER_FLAGS and `flags`, and the bundled
    model, or the one of tests/seeing_models.py that `model` names.
    """

    name: str
    requirement: str
    script: Path
    flags: tuple[str, ...] = ()
    uses_quire: bool = False  # the script imports it
    model: str = ""

    @property
    def python(self) -> Path:
        return environments() / self.name / "bin" / "python"

    def install(self) -> None:
        subprocess.run([sys.executable, "-m", "venv", self.python.parent.parent], check=True)
        folder, package = self.python.parent.parent, self.requirement.removeprefix("npm:")
        command = [self.python, "-m", "pip", "install", "--quiet", "--upgrade", *package.split()]
        if package != self.requirement:
            command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", folder, package]
        subprocess.run(command, check=True)
        if self.uses_quire:
            self.add_packages_of_this_python()

    def add_packages_of_this_python(self) -> None:
        """Quire and what it needs can be imported in the environment, whose own packages win."""
        show = "import sysconfig; print(sysconfig.get_path('purelib'))"
        done = subprocess.run([self.python, "-c", show], capture_output=True, text=True, check=True)
        checkouts = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        of_this = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
        (Path(done.stdout.strip()) / "quire.pth").write_text("\n".join([of_this, *checkouts, ""]))

    def run(self, address: str, model_directory: Path) -> dict:
        """Return {"version", "passed": [...], "failed": {...}}, as printed by the script."""
        variables = {
            key: value
            for key, value in os.environ.items()
            if key not in ("PYTHONPATH", "OPENAI_API_KEY", "ANTHROPIC_API_KEY")
        }
        offline = {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "NO_PROXY": "127.0.0.1",
            "ANONYMIZED_TELEMETRY": "0",
        }
        command = [str(self.python), str(self.script), address, str(model_directory)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=variables | offline,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode or not done.stdout.strip():
            return {"version": "?", "passed": [], "failed": {self.script.name: done.stderr[-4000:]}}
        return json.loads(done.stdout.strip().splitlines()[-1])


def environments() -> Path:
    return Path(os.environ.get("QUIRE_CLIENTS", HERE / ".clients"))


def clients() -> list[Client]:
    """Return the clients of every file client_*.py. REQUIREMENTS lists the environments in which it
    runs; FLAGS, if present, are flags of the server, and MODEL its model; USES_QUIRE = True makes
    Quire importable.
    """
    found = []
    for script in sorted(HERE.glob("client_*.py")):
        stated = {
            ast.unparse(node.targets[0]): node.value
            for node in ast.parse(script.read_text()).body
            if isinstance(node, ast.Assign)
        }
        flags = tuple(ast.literal_eval(stated["FLAGS"])) if "FLAGS" in stated else ()
        model = ast.literal_eval(stated["MODEL"]) if "MODEL" in stated else ""
        found += [
            Client(name, requirement, script, flags, "USES_QUIRE" in stated, model)
            for name, requirement in ast.literal_eval(stated["REQUIREMENTS"]).items()
        ]
    return sorted(found, key=lambda client: (client.model, client.flags, client.name))


@contextmanager
def server_of(flags: tuple[str, ...], model: str) -> Iterator[str]:
    """Yield the address of a server for clients with these flags and this model."""
    from quire.tests.frontend.server.conftest import running_server

    with tempfile.TemporaryDirectory() as directory:
        named = ["--batch-dir", str(Path(directory) / "batches")]
        if model:
            from quire.tests.seeing_models import save_seeing_model

            named.append(str(save_seeing_model(Path(directory), model)))
        with running_server(*named, *SERVER_FLAGS, *flags) as server:
            yield str(server.base_url).rstrip("/")


def main(argv: list[str]) -> int:
    wanted = [client for client in clients() if not argv[1:] or client.name in argv[1:]]
    if argv[:1] == ["install"]:
        for client in wanted:
            print(f"{client.name}: install {client.requirement}", flush=True)
            client.install()
        return 0
    if argv[:1] == ["table"]:
        return print_table(wanted)
    print(__doc__.split("\n\n", 1)[1])
    return 2


def print_row(client: Client, address: str, model_directory: Path) -> int:
    """Print a table row. Return the number of failed checks."""
    if not client.python.exists():
        print(f"| {client.name} | - | - | not installed |", flush=True)
        return 0
    found = client.run(address, model_directory)
    failed = found["failed"]
    result = f"failed: {', '.join(failed)}" if failed else "passed"
    print(
        f"| {client.name} | {found['version']} | {len(found['passed']) + len(failed)} | {result} |",
        flush=True,
    )
    for name, problem in failed.items():
        print(f"{name}:\n{problem}", file=sys.stderr)
    return len(failed)


def print_table(wanted: list[Client]) -> int:
    import quire

    model_directory, num_failed = Path(quire.__file__).parent / "frontend" / "bundled_model", 0
    print("| client | version | checks | result |\n|---|---|---|---|")
    for (flags, model), group in groupby(wanted, key=lambda client: (client.flags, client.model)):
        with server_of(flags, model) as address:
            for client in group:
                num_failed += print_row(client, address, model_directory)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
