"""examples/open_webui/compose.yaml: the image of the Dockerfile beside Open WebUI. No container is
started; `pytest -m clients -k release` checks the file against Compose's schema.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from quire.frontend.cli.serve import make_parser
from quire.frontend.server.app import all_routes
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.state import ServerState
from quire.tests.clusters.test_container_file import of, read

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples/open_webui"


@pytest.fixture(scope="module")
def services() -> dict:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]


def test_the_image_is_built_from_the_dockerfile(services) -> None:
    build = services["quire"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    arguments = of(read((ROOT / "Dockerfile").read_text())[0], "ARG")
    assert list(build["args"]) == arguments == ["PIP_EXTRA_INDEX_URL"]


def test_the_volume_is_a_folder_of_the_user(services) -> None:
    """A named volume gets its owner from the image, where the folder has to exist."""
    final = read((ROOT / "Dockerfile").read_text())[-1]
    [volume] = [text for text in services["quire"]["volumes"] if text.startswith("cache:")]
    path, [user] = volume.removeprefix("cache:"), of(final, "USER")
    owner, group = user.split(":")
    assert f"install --directory --owner {owner} --group {group} {path}" in of(final, "RUN")[0]
    assert of(final, "WORKDIR") == [str(Path(path).parent)] and services["quire"]["read_only"]


def test_open_webui_waits_for_quire_and_asks_it(services) -> None:
    _, *words = services["quire"]["command"]
    parsed = make_parser([]).parse(["model" if "$" in word else word for word in words])
    assert parsed.host == "0.0.0.0"
    web = services["open-webui"]
    assert web["depends_on"] == {"quire": {"condition": "service_healthy"}}
    base = urlsplit(web["environment"]["OPENAI_API_BASE_URL"])
    final = read((ROOT / "Dockerfile").read_text())[-1]
    assert base.hostname == "quire" and [str(base.port)] == of(final, "EXPOSE")
    routes = {route.path for route in all_routes(ServerState(ServerConfig(), "model"))}
    assert {f"{base.path}/models", f"{base.path}/chat/completions"} <= routes


def test_the_drain_fits_into_the_grace_period(services) -> None:
    seconds = float(services["quire"]["stop_grace_period"].removesuffix("s"))
    assert seconds > ServerConfig().drain_timeout_s
    assert "ports" not in services["quire"]  # no keys: only the other container reaches it
