"""Packages with plugins, as pip installs them."""

from pathlib import Path


def install_plugin(
    directory: Path, code: str, *, module: str = "my_kernels", name: str = "mine"
) -> None:
    """Create what pip installs for a package `module` whose module is the plugin `name`."""
    (directory / f"{module}.py").write_text(code)
    info = directory / f"{module}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[quire.plugins]\n{name} = {module}\n")
