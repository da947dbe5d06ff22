"""What infra/ has for clusters, checked as far as can be without one: schemas, Ray's own validation, the jobs' own parsers."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

from pipeline.options import Options, Verify, parse_bytes
from tests.commands import check, jobs_in
from tests.conftest import REPO_ROOT

INFRA = REPO_ROOT / "infra"
CRDS = REPO_ROOT.parent / "shared" / "kuberay-crds"
MANIFESTS = {"RayJob": "rayjob", "RayCronJob": "raycronjob"}
IMAGE = "kv-cache-codec:0.1.0"


def manifest(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((INFRA / "kuberay" / f"{MANIFESTS[kind]}.yaml").read_text())
    return found


def job_spec(kind: str) -> dict[str, Any]:
    spec: dict[str, Any] = manifest(kind)["spec"]
    return spec["jobTemplate"] if kind == "RayCronJob" else spec


def strict(schema: Any) -> Any:
    """The schema as the API server applies it: what it does not know is refused, where it does not say otherwise."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {name: strict(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        out.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        out = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": schema.get("pattern", "")}]}
    return out


def crd(kind: str) -> dict[str, Any]:
    path = CRDS / f"ray.io_{MANIFESTS[kind]}s.yaml"
    if not path.exists():
        pytest.skip(
            f"KubeRay's CRDs are not at {CRDS.name} beside the repository: put ray-project/kuberay's ray.io_*.yaml there"
        )
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


@pytest.mark.parametrize("kind", MANIFESTS)
def test_manifests_fit_kuberays_schemas(kind: str) -> None:
    definition, found = crd(kind), manifest(kind)
    group, _, version = found["apiVersion"].partition("/")
    assert definition["spec"]["group"] == group and definition["spec"]["names"]["kind"] == found["kind"] == kind
    (served,) = (one for one in definition["spec"]["versions"] if one["name"] == version and one["served"])
    schema = served["schema"]["openAPIV3Schema"]
    # metadata is Kubernetes' own and not described here
    body = strict({**schema, "properties": {**schema["properties"], "metadata": {"type": "object"}}})
    jsonschema.Draft7Validator(body).validate(found)
    for path, value in ((("spec", "entrypont"), "typo"), (("spec",), [])):
        broken = yaml.safe_load(yaml.safe_dump(found))
        place = broken
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft7Validator(body).validate(broken)


@pytest.mark.parametrize("kind", MANIFESTS)
def test_what_manifests_run_is_what_jobs_take(kind: str) -> None:
    ((job, arguments),) = jobs_in(job_spec(kind)["entrypoint"])
    given = check(job, arguments)
    if given is None:
        pytest.skip(f"{job} is not there yet")
    assert given.store == "s3://kv-store/prefixes"
    if kind == "RayJob":
        options = Options(
            **{name: value for name, value in vars(given).items() if name in Options.__dataclass_fields__}
        )
        options.check()
        assert Verify.parse(given.verify).fraction == 0.1 and parse_bytes(given.max_store_bytes) == 5 * 10**12


@pytest.mark.parametrize("kind", MANIFESTS)
def test_clusters_survive_the_loss_of_a_worker(kind: str) -> None:
    """The driver's node is not a spot one and runs no actor; workers are, and there is one when the job begins."""
    spec = job_spec(kind)
    cluster = spec["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0" and "nodeSelector" not in head["template"]["spec"]
    assert 1 <= workers["minReplicas"] < workers["maxReplicas"] and cluster["enableInTreeAutoscaling"]
    pod = workers["template"]["spec"]
    assert any(one["key"] == "spot" for one in pod["tolerations"]) and spec["backoffLimit"] >= 1
    for container in (*head["template"]["spec"]["containers"], *pod["containers"]):
        assert container["image"] == IMAGE and container["resources"]["limits"]["memory"]
        names = {one["name"] for one in container["env"]}
        assert not any("SECRET" in name or "KEY" in name for name in names) and container["envFrom"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_versions_are_those_that_tests_run_with() -> None:
    pins = dict(re.findall(r"^([\w-]+)(?:\[[\w,]+\])?==(.+)$", (REPO_ROOT / "requirements.txt").read_text(), re.M))
    assert {job_spec(kind)["rayClusterSpec"]["rayVersion"] for kind in MANIFESTS} == {pins["ray"]}
    lines = (INFRA / "Dockerfile").read_text().splitlines()
    (base,) = (line.split()[1] for line in lines if line.startswith("FROM"))
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", base)
    assert (
        "requirements.txt" in " ".join(lines)
        and (REPO_ROOT / "requirements.txt").read_text().count("-c constraints.txt") == 1
    )
    copied = {
        word for line in lines if line.startswith("COPY") for word in line.split()[1:-1] if not word.startswith("-")
    }
    assert copied == {"requirements.txt", "constraints.txt", "codec", "pipeline", "jobs"}
    assert all((REPO_ROOT / name).exists() for name in copied)
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users and users[-1] != "root"
    project = (REPO_ROOT / "pyproject.toml").read_text()
    assert f'version = "{IMAGE.partition(":")[2]}"' in project


def test_rays_autoscaler_takes_the_cluster() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    given = yaml.safe_load((INFRA / "cluster.yaml").read_text())
    validate_config(prepare_config(given))
    types = given["available_node_types"]
    assert types["gpu"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in types["head"]["node_config"] and types["head"]["resources"] == {"CPU": 0}
    assert 1 <= types["gpu"]["min_workers"] < types["gpu"]["max_workers"] <= given["max_workers"]
    assert given["docker"]["image"] == IMAGE
    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepare_config(given | {"max_worker": 3}))


def test_cron_lines_run_jobs_as_they_are() -> None:
    lines = [line for line in (INFRA / "crontab").read_text().splitlines() if re.match(r"[\d*]", line)]
    assert len(lines) == 3
    seen = []
    for line in lines:
        *times, command = line.split(maxsplit=5)
        assert all(re.fullmatch(r"[\d*/,-]+", time) for time in times) and shlex.split(command)
        for job, arguments in jobs_in(command):
            check(job, arguments)
            seen.append(job)
    assert seen == ["jobs/recompress.py", "jobs/verify.py", "jobs/gc.py"]


def test_no_file_of_infra_has_tabs_or_secrets() -> None:
    for path in (INFRA / "cluster.yaml", *sorted((INFRA / "kuberay").glob("*.yaml"))):
        text = Path(path).read_text()
        assert "\t" not in text and not re.search(r"(?i)(secret_access_key|password)\s*:\s*\S", text)


@pytest.fixture
def dev_s3() -> ModuleType:
    loader = SourceFileLoader("dev_s3", str(INFRA / "dev-s3"))
    spec = importlib.util.spec_from_loader("dev_s3", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("wanted", [0, 8333, 12345, 21459, 65000])
def test_no_service_of_the_s3_server_has_anothers_grpc_port(
    dev_s3: ModuleType, monkeypatch: pytest.MonkeyPatch, wanted: int
) -> None:
    # What is drawn first is what collides with the port that was asked for, or with what was drawn before.
    drawn = itertools.chain([wanted % 10000, wanted % 10000], range(3000, 3999))
    monkeypatch.setattr(dev_s3.secrets, "randbelow", lambda limit: next(drawn))
    port, ports = dev_s3.choose_ports(wanted)
    assert port == wanted or not wanted
    everything = [port, *ports, *map(dev_s3.grpc_port, [port, *ports])]
    assert len(set(everything)) == len(everything) == 10
