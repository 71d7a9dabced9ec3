"""examples/kubernetes and docs/kubernetes.md: the manifests are valid, and belong together."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from celery_toc.cli import toc

from ..support.cases import each

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "kubernetes"
MANIFESTS = EXAMPLE / "manifests"
PAGE = ROOT / "docs" / "kubernetes.md"

#: An old Kubernetes that clusters may still have, and a newer one.
VERSIONS = ("1.28", "1.34")


#: Parameters of a trigger of KEDA's type metrics-api, which its schema leaves to the type.
METRICS_API = {"url", "valueLocation", "targetValue", "activationTargetValue", "authMode"}


@cache
def schema_of(kind: str) -> Any:
    """KEDA's schema of a kind, as a server takes it that validates strictly: nothing else."""
    schema = json.loads(Path(__file__).with_name("keda.json").read_text())[kind]
    for name, part in [*schema["$defs"].items(), ("", schema)]:
        if "properties" in part and name != "ObjectMeta":
            part["additionalProperties"] = False
    return schema


def check(document: dict[str, Any], version: str) -> None:
    """Raises what the validator says of a manifest that is wrong."""
    if document["apiVersion"].startswith("keda.sh/"):
        jsonschema.validate(document, schema_of(document["kind"]))
    else:
        kubernetes_validate.validate(document, version, strict=True)


def every() -> dict[str, dict[str, Any]]:
    """Kind/name -> manifest, of all that kustomize applies."""
    listed = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["resources"]
    documents = [
        one for name in listed for one in yaml.safe_load_all((MANIFESTS / name).read_text())
    ]
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in documents}


def container(name: str) -> dict[str, Any]:
    [found] = every()[f"Deployment/{name}"]["spec"]["template"]["spec"]["containers"]
    return found


@each("version", VERSIONS)
@each("name", list(every()))
def test_a_manifest_is_valid(name: str, version: str) -> None:
    check(every()[name], version)


@each(
    ("name", "path", "value"),
    [
        ("Deployment/mail-worker", "spec.template.spec.terminationGracePeriod", 300),
        ("Deployment/mail-worker", "spec.template.spec.terminationGracePeriodSeconds", "long"),
        ("Service/toc-http", "spec.port", 8088),
        ("PodDisruptionBudget/mail-worker", "spec.maxUnavailable", []),
        ("ScaledObject/mail-worker", "spec.maxReplicas", 20),
        ("ScaledObject/mail-worker", "spec.triggers", [{"type": "metrics-api"}]),
        ("ScaledObject/mail-worker", "spec.scaleTargetRef", {"kind": "Deployment"}),
        ("TriggerAuthentication/toc-http", "spec.secretTargetRef", {}),
        ("TriggerAuthentication/toc-http", "apiVersion", "keda.sh/v1"),
    ],
)
def test_the_validator_finds_what_is_wrong(name: str, path: str, value: Any) -> None:
    document = every()[name]
    *folders, last = path.split(".")
    inner = document
    for folder in folders:
        inner = inner[folder]
    inner[last] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(document, VERSIONS[-1])


def test_the_manifests_of_the_page_are_valid() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    documents = [yaml.safe_load(block) for block in blocks]
    whole = [one for one in documents if "kind" in one]
    assert whole[0]["kind"] == "Deployment", "the page begins with the smallest that works"
    for one in whole:
        check(one, VERSIONS[-1])
    # The others are parts of the example.
    parts = {key: value for one in documents if "kind" not in one for key, value in one.items()}
    assert parts["lifecycle"] == container("mail-worker")["lifecycle"]
    assert parts["triggers"] == every()["ScaledObject/mail-worker"]["spec"]["triggers"]


def test_the_manifests_belong_together() -> None:
    found = every()
    for name, one in found.items():
        spec = one["spec"]
        if name.startswith(("Deployment", "PodDisruptionBudget")):
            assert spec["selector"]["matchLabels"] == {"app": one["metadata"]["name"]}
        if name.startswith("Deployment"):
            assert spec["template"]["metadata"]["labels"] == spec["selector"]["matchLabels"]
    scaled = found["ScaledObject/mail-worker"]["spec"]
    assert f"Deployment/{scaled['scaleTargetRef']['name']}" in found
    assert "replicas" not in found["Deployment/mail-worker"]["spec"], "two would say how many"
    [trigger] = scaled["triggers"]
    assert f"TriggerAuthentication/{trigger['authenticationRef']['name']}" in found
    service = found["Service/toc-http"]
    namespace = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["namespace"]
    [port] = service["spec"]["ports"]
    host = f"http://{service['metadata']['name']}.{namespace}:{port['port']}/"
    assert trigger["metadata"]["url"].startswith(host)
    assert METRICS_API >= trigger["metadata"].keys() >= {"url", "valueLocation", "targetValue"}
    assert service["spec"]["selector"] == {"app": "toc-http"}
    web = container("toc-http")
    assert web["ports"][0]["name"] == port["targetPort"]
    assert f"--port={web['ports'][0]['containerPort']}" in web["command"]


def test_every_secret_is_made_by_the_readme() -> None:
    text = "".join(path.read_text() for path in MANIFESTS.glob("*.yaml"))
    named = set(re.findall(r"secretKeyRef: \{name: ([\w-]+)|secretName: ([\w-]+)", text))
    readme = (EXAMPLE / "README.md").read_text()
    names = {one for pair in named for one in pair if one} | {"toc-keda"}
    assert names == {"toc", "toc-keda"}
    assert all(f"create secret generic {name} " in readme for name in names)


@pytest.mark.parametrize("name", ["mail-worker", "toc-http"])
def test_a_container_gets_the_signal_and_has_time_to_end(name: str) -> None:
    pod = every()[f"Deployment/{name}"]["spec"]["template"]["spec"]
    [one] = pod["containers"]
    assert one["command"][0] == "celery", "a shell would keep SIGTERM for itself"
    assert pod["terminationGracePeriodSeconds"] >= 20
    assert {"preStop"} == one["lifecycle"].keys()
    assert {"livenessProbe", "readinessProbe"} <= one.keys()
    assert one["securityContext"]["readOnlyRootFilesystem"]
    written = {mount["mountPath"] for mount in one["volumeMounts"] if not mount.get("readOnly")}
    assert written == {"/tmp"}


@pytest.mark.parametrize("name", ["mail-worker", "toc-http"])
def test_a_namespace_that_restricts_pods_takes_it(name: str) -> None:
    """What the Pod Security Standard ``restricted`` asks for, and nobody gets a token of the API of
    Kubernetes who does not use it."""
    pod = every()[f"Deployment/{name}"]["spec"]["template"]["spec"]
    [one] = pod["containers"]
    wanted = {
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert one["securityContext"].items() >= wanted.items()
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"configMap", "emptyDir", "projected", "secret", "persistentVolumeClaim"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", ["mail-worker", "toc-http"])
def test_a_node_that_is_busy_kills_nothing(name: str) -> None:
    """A probe has a second unless it says otherwise, and a command of a probe starts a shell."""
    one = container(name)
    probes = [probe for key, probe in one.items() if key.endswith("Probe")]
    assert len(probes) >= 2
    assert all(probe["timeoutSeconds"] >= 5 for probe in probes)


def test_a_worker_that_begins_may_wait_for_redis_as_long_as_one_that_runs() -> None:
    one = container("mail-worker")
    minutes = int(re.findall(r"-mmin -(\d+)", str(one["livenessProbe"]["exec"]["command"]))[0])
    startup = one["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 60 * minutes


def test_the_command_of_the_api_is_one_that_there_is() -> None:
    command = container("toc-http")["command"]
    assert command[:4] == ["celery", "--app=shop", "toc", "web"]
    shown = CliRunner().invoke(toc, ["web", "--help"]).output
    for option in command[4:]:
        assert option.partition("=")[0] in shown


def test_the_image_has_what_the_manifests_run() -> None:
    dockerfile = (EXAMPLE / "image" / "Dockerfile").read_text()
    [copied] = re.findall(r"^COPY (.*) \./$", dockerfile, re.MULTILINE)
    assert {path.name for path in (EXAMPLE / "image").glob("*.py")} == set(copied.split())
    user = int(re.findall(r"^USER (\d+)$", dockerfile, re.MULTILINE)[0])
    for name in ("mail-worker", "toc-http"):
        assert container(name)["securityContext"]["runAsUser"] == user
