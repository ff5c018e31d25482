"""Build steps that pyproject.toml cannot state: file name and wheel tag of the native library, and
that this file is no module of the package, whose root is the repository's.

Must not know: anything else about the package; its metadata is in pyproject.toml.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py


class BuildNativeLibrary(build_ext):
    """Names the library `_native.so`: it is loaded through ctypes and uses no Python API."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"


class PlatformWheel(bdist_wheel):
    """Tags the wheel `py3-none-<platform>`: one wheel serves every supported Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class PackageModules(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [(name, module, path) for name, module, path in found if module != "setup"]


setup(
    cmdclass={
        "bdist_wheel": PlatformWheel,
        "build_ext": BuildNativeLibrary,
        "build_py": PackageModules,
    }
)
