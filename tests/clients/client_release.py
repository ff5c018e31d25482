"""Published schemas and linters for what a release needs: the workflows, Compose's file, and the
recipe for conda-forge. They need no server.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import rattler_build
from checks import raises, run

REQUIREMENTS = {"release": "py-rattler-build check-jsonschema compose-lint zizmor"}
DISTRIBUTION = "py-rattler-build"
ROOT = Path(__file__).resolve().parents[2]
VARIANTS = """
c_stdlib: [sysroot]
c_stdlib_version: ["2.28"]
cxx_compiler: [gxx]
python: ["3.13"]
"""


def lint(tool: str, *words: str | Path) -> str:
    done = subprocess.run(
        [Path(sys.executable).parent / tool, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def filled() -> str:
    with tempfile.NamedTemporaryFile() as sdist:
        words = ["conda-forge.yaml", sdist.name, "1.2.3", "https://example.org/repository", "me"]
        command = [ROOT / ".ci/recipes/fill", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_the_workflows(address: str, _: str) -> None:
    workflows = sorted((ROOT / ".github/workflows").glob("*.yml"))
    lint("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as rules:
        # Actions are named by version, not by commit.
        rules.write("rules: {unpinned-uses: {config: {policies: {'*': ref-pin}}}}")
        rules.flush()
        words = ("--offline", "--no-progress", "--config", rules.name)
        lint("zizmor", *words, ROOT / ".github/workflows/release.yml")


def check_the_compose_file(address: str, _: str) -> None:
    path = ROOT / "examples/open_webui/compose.yaml"
    lint("check-jsonschema", "--builtin-schema", "vendor.compose-spec", path)
    lint("compose-lint", path)


def check_the_conda_recipe(address: str, _: str) -> None:
    variants = rattler_build.VariantConfig.from_yaml(VARIANTS)
    [made] = rattler_build.Stage0Recipe.from_yaml(filled()).render(variants)
    assert (made.recipe.package.name, str(made.recipe.package.version)) == ("quire-engine", "1.2.3")


def check_a_wrong_field_is_found(address: str, _: str) -> None:
    wrong = filled().replace("requirements:", "requires:")
    raises(rattler_build.RecipeParseError, lambda: rattler_build.Stage0Recipe.from_yaml(wrong))


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
