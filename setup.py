"""Build steps that pyproject.toml cannot state: file name and wheel tag of the native library, that
its sources compile in parallel, and that this file is no module of the package, whose root is the
repository's.

Must not know: anything else about the package; its metadata is in pyproject.toml.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py


class BuildNativeLibrary(build_ext):
    """Names the library `_native.so`: it is loaded through ctypes and uses no Python API."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extensions(self) -> None:
        """Compiles sources in parallel: an instruction set takes about a minute."""
        compile_in_turn = self.compiler.compile

        def compile_in_parallel(sources: list[str], **options) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_in_turn([source], **options), sources)
                return [path for of_source in objects for path in of_source]

        self.compiler.compile = compile_in_parallel
        super().build_extensions()


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
