"""What `kubectl kustomize FOLDER` prints, for the few fields that examples/kubernetes uses, and
schemas of the resources there. An unknown field is an error in both.

`pytest -m clients` compares them with kubectl and with the published schemas
(tests/clients/client_kubernetes.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import yaml

KUSTOMIZATION = {"apiVersion", "kind", "resources", "images", "patches"}


def build(folder: Path) -> list[dict[str, Any]]:
    """The resources of a folder with a kustomization.yaml."""
    wanted = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert (
        wanted["apiVersion"] == "kustomize.config.k8s.io/v1beta1" and not {*wanted} - KUSTOMIZATION
    )
    resources = []
    for name in wanted["resources"]:
        path = folder / name
        resources += build(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for image in wanted.get("images", ()):
        for resource in resources:
            if resource["kind"] == "Deployment":
                _rename(resource, **image)
    for patch in wanted.get("patches", ()):
        target = patch["target"]
        [resource] = [
            one
            for one in resources
            if (one["kind"], one["metadata"]["name"]) == (target["kind"], target["name"])
        ]
        for step in yaml.safe_load(patch["patch"]):
            _apply(resource, **step)
    return resources


def _rename(deployment: dict[str, Any], name: str, newName: str, newTag: str) -> None:
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == name
    container["image"] = f"{newName}:{newTag}"


def _apply(resource: dict[str, Any], op: str, path: str, value: Any) -> None:
    """One step of a JSON patch (RFC 6902)."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
    at: Any = resource
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    assert op == "add"
    if last == "-":
        at.append(value)
    else:
        at[last] = value


# ---------------------------------------------------------------- schemas

TEXT = {"type": "string", "minLength": 1}
NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
COUNT = {"type": "integer", "minimum": 0}
YES_OR_NO = {"type": "boolean"}
QUANTITY = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|Ki|Mi|Gi|Ti)?$"}
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}
LABELS = {
    "type": "object",
    "minProperties": 1,
    "propertyNames": {"pattern": r"^([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"},
    "additionalProperties": {"pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?$"},
}


def record(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """An object with these fields and no others."""
    fields = required | optional
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def several(items: dict[str, Any], at_most: int = 64) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": at_most}


def resource(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = record({"name": NAME}, labels=LABELS)
    return record(
        {"apiVersion": {"const": version}, "kind": {"const": kind}}
        | {"metadata": metadata, "spec": spec}
    )


SELECTOR = record({"matchLabels": LABELS})
PROBE = record(
    {"httpGet": record({"path": TEXT, "port": {"type": ["string", "integer"]}})},
    periodSeconds=COUNT,
    timeoutSeconds=COUNT,
    failureThreshold=COUNT,
)
FROM_FIELD = record(
    {"fieldRef": record({"fieldPath": {"enum": ["status.podIP", "metadata.name"]}})}
)
CONTAINER = record(
    {"name": NAME, "image": TEXT},
    args=several(TEXT),
    env=several(record({"name": TEXT}, value=TEXT, valueFrom=FROM_FIELD)),
    ports=several(record({"containerPort": PORT}, name={**NAME, "maxLength": 15})),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    lifecycle=record({"preStop": record({"sleep": record({"seconds": COUNT})})}),
    resources=record({"requests": QUANTITIES, "limits": QUANTITIES}),
    securityContext=record(
        {},
        allowPrivilegeEscalation=YES_OR_NO,
        readOnlyRootFilesystem=YES_OR_NO,
        capabilities=record({"drop": several(TEXT)}),
    ),
    volumeMounts=several(record({"name": NAME, "mountPath": TEXT}, readOnly=YES_OR_NO)),
)
VOLUME = record(
    {"name": NAME},
    persistentVolumeClaim=record({"claimName": NAME}),
    emptyDir=record({}, sizeLimit=QUANTITY),
) | {"minProperties": 2, "maxProperties": 2}
POD = record(
    {"containers": several(CONTAINER)},
    terminationGracePeriodSeconds=COUNT,
    automountServiceAccountToken=YES_OR_NO,
    securityContext=record(
        {},
        runAsNonRoot=YES_OR_NO,
        runAsUser=COUNT,
        runAsGroup=COUNT,
        fsGroup=COUNT,
        seccompProfile=record({"type": {"enum": ["RuntimeDefault", "Unconfined", "Localhost"]}}),
    ),
    volumes=several(VOLUME),
)
ROLLING = record({}, maxUnavailable=COUNT, maxSurge=COUNT)
POOL_REF = record(
    {"name": NAME, "port": record({"number": PORT})},
    failureMode={"enum": ["FailOpen", "FailClose"]},
)
BACKEND = record({"name": NAME}, group=TEXT, kind=TEXT, port=PORT)
PATH_MATCH = record({"path": record({"type": {"enum": ["Exact", "PathPrefix"]}, "value": TEXT})})
DURATION = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
SCHEMAS = {
    "Deployment": resource(
        "apps/v1",
        "Deployment",
        record(
            {
                "selector": SELECTOR,
                "template": record({"metadata": record({"labels": LABELS}), "spec": POD}),
            },
            replicas=COUNT,
            strategy=record({"rollingUpdate": ROLLING}),
        ),
    ),
    "Service": resource(
        "v1",
        "Service",
        record(
            {
                "selector": LABELS,
                "ports": several(record({"port": PORT}, name=NAME, targetPort=NAME)),
            }
        ),
    ),
    "PersistentVolumeClaim": resource(
        "v1",
        "PersistentVolumeClaim",
        record(
            {
                "accessModes": several(
                    {"enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"]}
                ),
                "resources": record({"requests": QUANTITIES}),
            }
        ),
    ),
    "InferencePool": resource(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        record(
            {
                "selector": SELECTOR,
                "targetPorts": several(record({"number": PORT}), at_most=8),
                "endpointPickerRef": POOL_REF,
            }
        ),
    ),
    "HTTPRoute": resource(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        record(
            {
                "parentRefs": several(record({"name": NAME})),
                "rules": several(
                    record(
                        {"backendRefs": several(BACKEND)},
                        matches=several(PATH_MATCH),
                        timeouts=record({"request": DURATION}),
                    )
                ),
            }
        ),
    ),
    "PodMonitor": resource(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        record(
            {
                "selector": SELECTOR,
                "podMetricsEndpoints": several(
                    record({"port": NAME}, path=TEXT, interval=DURATION, scrapeTimeout=DURATION)
                ),
            }
        ),
    ),
}


def validate(one: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError, and KeyError for an unknown kind."""
    jsonschema.Draft202012Validator(SCHEMAS[one["kind"]]).validate(one)
