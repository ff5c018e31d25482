"""The manifests in examples/kubernetes: valid, consistent, and true of `quire serve`."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from quire.frontend.cli.flags import engine_flags, given, server_flags
from quire.frontend.cli.serve import make_parser
from quire.frontend.server.app import all_routes
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.state import ServerState
from quire.tests.clusters.kustomize import build, validate

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
OVERLAYS = ["base", "llm-d"]
END_OF_ENGINE_S = 15  # beyond the drain: uvicorn's end and the engine's


@pytest.fixture(scope="module")
def by_kind() -> dict[str, Any]:
    return {one["kind"]: one for one in build(FOLDER / "llm-d")}


@pytest.fixture(scope="module")
def pod(by_kind: dict[str, Any]) -> dict[str, Any]:
    return by_kind["Deployment"]["spec"]["template"]


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    [container] = pod["spec"]["containers"]
    return container


@pytest.fixture(scope="module")
def config(container: dict[str, Any]) -> ServerConfig:
    """The arguments as `quire serve` reads them. It refuses unknown ones."""
    command, *words = container["args"]
    args = make_parser([]).parse(words)
    assert command == "serve"
    of_engine = given(args, engine_flags())
    events = of_engine.pop("kv_events_config")
    assert of_engine == {"model": "/models/model", "served_model_name": "model"}
    # llm-d: kv@POD@MODEL, where a Pod is known by its address and port
    assert events.topic == f"kv@$(POD_IP):{args.port}@model" and events.endpoint == "tcp://*:5557"
    assert events.enable_kv_cache_events
    return ServerConfig(**given(args, server_flags()))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_are_valid(overlay: str) -> None:
    built = build(FOLDER / overlay)
    for one in built:
        validate(one)
    assert len({(one["kind"], one["metadata"]["name"]) for one in built}) == len(built) >= 3


def fields(at: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Every field of an object whose names a schema knows."""
    if isinstance(at, list):
        for item in at:
            yield from fields(item)
    elif isinstance(at, dict):
        for name, value in at.items():
            if name not in ("labels", "matchLabels", "requests", "limits"):
                yield at, name
                yield from fields(value)


@pytest.mark.parametrize("kind", ["Deployment", "InferencePool", "HTTPRoute", "PodMonitor"])
def test_a_wrong_field_or_type_is_found(by_kind: dict[str, Any], kind: str) -> None:
    """Every field in turn is misspelt, then given a value of another type."""
    num_fields = 0
    for index, _ in enumerate(list(fields(by_kind[kind]))):
        for is_misspelt in (True, False):
            changed = copy.deepcopy(by_kind[kind])
            parent, name = list(fields(changed))[index]
            if is_misspelt:
                parent[name + "s"] = parent.pop(name)
            else:
                parent[name] = 1.5
            if name == "kind" and parent is changed:
                continue  # it selects the schema
            with pytest.raises(jsonschema.ValidationError):
                validate(changed)
        num_fields += 1
    assert num_fields > 8


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_builds_the_same(overlay: str) -> None:
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("no kubectl")
    command = [kubectl, "kustomize", FOLDER / overlay]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)

    def ordered(resources: Any) -> list[str]:
        return sorted(json.dumps(one, sort_keys=True) for one in resources)

    assert ordered(yaml.safe_load_all(done.stdout)) == ordered(build(FOLDER / overlay))


def test_every_selector_finds_the_pods(by_kind: dict[str, Any], pod: dict[str, Any]) -> None:
    labels = pod["metadata"]["labels"].items()
    for kind in ("Deployment", "InferencePool", "PodMonitor"):
        assert by_kind[kind]["spec"]["selector"]["matchLabels"].items() <= labels
    assert by_kind["Service"]["spec"]["selector"].items() <= labels
    assert {"llm-d.ai/engine-type": "vllm"}.items() <= dict(labels).items()
    [rule] = by_kind["HTTPRoute"]["spec"]["rules"]
    [backend] = rule["backendRefs"]
    pool = by_kind["InferencePool"]
    assert pool["apiVersion"] == f"{backend['group']}/v1"
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])


def test_ports_are_the_servers(
    by_kind: dict[str, Any], container: dict[str, Any], config: ServerConfig
) -> None:
    port, of_events = container["ports"]
    assert of_events["containerPort"] == 5557
    assert port["containerPort"] == config.port and config.host == "0.0.0.0"
    assert by_kind["InferencePool"]["spec"]["targetPorts"] == [{"number": config.port}]
    [of_service] = by_kind["Service"]["spec"]["ports"]
    [of_monitor] = by_kind["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert of_service["targetPort"] == of_monitor["port"] == port["name"]


def test_probes_and_scrapes_ask_for_routes_of_the_server(
    by_kind: dict[str, Any], container: dict[str, Any], config: ServerConfig
) -> None:
    paths = {route.path for route in all_routes(ServerState(config, "model"))}
    probes = {name: container[name]["httpGet"] for name in container if name.endswith("Probe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/health/ready",
        "readinessProbe": "/health/ready",
        "livenessProbe": "/health",  # answers while a model loads and an engine is replaced
    }
    [endpoint] = by_kind["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert {*(probe["path"] for probe in probes.values()), endpoint["path"]} <= paths
    assert config.vllm_metrics  # read by the endpoint picker
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600


def test_a_drain_fits_into_the_grace_period(
    pod: dict[str, Any], container: dict[str, Any], config: ServerConfig
) -> None:
    before_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace_s = pod["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= before_s + config.drain_timeout_s + END_OF_ENGINE_S
    readiness = container["readinessProbe"]
    assert readiness["periodSeconds"] * readiness["failureThreshold"] <= before_s + 5


def test_the_container_writes_only_into_volumes(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["XDG_CACHE_HOME"] == mounts["cache"]["mountPath"]
    assert container["securityContext"]["readOnlyRootFilesystem"] and mounts["tmp"]
    assert container["args"][1].startswith(mounts["models"]["mountPath"] + "/")
    assert mounts["models"]["readOnly"] and pod["spec"]["securityContext"]["runAsNonRoot"]
    resources = container["resources"]
    assert resources["requests"] == resources["limits"] and resources["limits"]["cpu"].isdigit()
