"""The manifests of deploy/ for Kubernetes and for two machines say what the program understands.

They are read as text and YAML everywhere. Where Helm's library, Kubernetes' schemas or Ray are
installed (the extras manifests and fleet), they are rendered and checked by these.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import typer.main
import yaml

from outrider.gateway.cli import COMMANDS
from outrider.gateway.engines.fleet.addresses import is_looked_up
from outrider.gateway.http.server.auth_dispatcher import FREE_PATHS, RECEIPT_KEYS_PATH
from outrider.gateway.settings.tree import Settings, load_settings
from outrider.gateway.wiring.ray.plan import FleetPlan, parse_plan

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "outrider"
TEMPLATES = [
    *sorted(CHART.glob("templates/*.yaml")),
    DEPLOY / "compose.engine.yaml",
    DEPLOY / "compose.gateway.yaml",
]
MODELS = {"models": {"large": "Qwen/Qwen3-8B", "small": "Qwen/Qwen3-0.6B"}}
KUBERNETES = ("1.27", "1.34")  # the oldest that the chart is for, and a new one


def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return found


def flags() -> Iterator[tuple[str, str]]:
    """Each flag of each command that a manifest starts: serve or engine."""
    for path in TEMPLATES:
        command = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if found := re.fullmatch(r"\s+- (serve|engine)", line):
                command = found[1]
            elif found := re.match(r"\s+- (--[a-z-]+)=?", line):
                yield command, found[1]


def test_every_flag_is_one_of_its_command() -> None:
    found = set(flags())
    assert {("serve", "--engines"), ("engine", "--listen")} <= found
    for name, flag in found:
        command: Any = typer.main.get_command(import_module(COMMANDS[name].module).app)
        known = {word for param in command.params for word in param.opts}
        assert flag in known, (name, flag)


def test_every_variable_is_a_setting() -> None:
    found = {
        name
        for path in (*TEMPLATES, CHART / "values.yaml")
        for name in re.findall(r"(?<![{\w])(OUTRIDER_\w+)(?=[=:] ?\S)", path.read_text())
        if f"export {name}" not in path.read_text()
        and not re.search(rf"^# +export.* {name}=", path.read_text(), re.MULTILINE)
    }
    assert {"OUTRIDER_DATABASE_URL", "OUTRIDER_KEYS__SECRET"} <= found
    for name in found:
        fields = Settings.model_fields
        for word in name.removeprefix("OUTRIDER_").lower().split("__"):
            assert word in fields, name
            fields = getattr(fields[word].annotation, "model_fields", {})


# ---- the chart --------------------------------------------------------------------------------


def test_the_charts_values_fit_their_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    check = jsonschema_rs.validator_for(schema)
    assert not check.is_valid(values())  # no model is named
    assert check.is_valid({**values(), **MODELS})
    assert set(values()) == set(schema["properties"]) - {"global"}
    for name in ("gateway", "engines", "secrets", "image"):
        assert set(values()[name]) == set(schema["properties"][name]["properties"])


def test_the_charts_times_leave_answers_time_to_end() -> None:
    own = load_settings(environ={}, flags=_flat(tomllib.loads(values()["settings"])))
    server, gateway = own.server, values()["gateway"]
    text = (CHART / "templates" / "gateway.yaml").read_text()
    assert gateway["terminationGracePeriodSeconds"] > server.drain_grace_s + server.drain_timeout_s
    assert values()["engines"]["terminationGracePeriodSeconds"] > server.drain_timeout_s
    period, failures = (
        int(re.findall(rf"{name}: (\d+)", text.partition("readinessProbe")[2])[0])
        for name in ("periodSeconds", "failureThreshold")
    )
    assert period * failures < server.drain_grace_s


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, options in settings.items()
        for name, value in options.items()
    }


def test_the_charts_probes_and_ports_are_the_programs() -> None:
    text = (CHART / "templates" / "gateway.yaml").read_text()
    assert {*re.findall(r"path: (\S+),", text), "/ping", RECEIPT_KEYS_PATH} == FREE_PATHS
    image = (DEPLOY / "Dockerfile").read_text()
    (port,) = re.findall(r"OUTRIDER_SERVER__PORT=(\d+)", image)
    assert f"containerPort: {port}" in text
    (user,) = set(re.findall(r"USER (\d+):\d+", image))
    assert f"runAsUser: {user}" in (CHART / "templates" / "_helpers.tpl").read_text()
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == _project()["version"]


def _project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, {"StatefulSet", "NetworkPolicy", "PodDisruptionBudget"}),
        (
            {
                "gateway": {"autoscaling": {"enabled": True}},
                "engines": {"gpus": 2, "storage": "", "nodeSelector": {"gpu": "h100"}},
            },
            {"HorizontalPodAutoscaler", "StatefulSet"},
        ),
        ({"engines": {"address": "http://outrider-engines-serve-svc:8000/"}}, {"Deployment"}),
    ],
    ids=["as it is", "GPUs and an autoscaler", "engines of a RayService"],
)
def test_helm_renders_what_kubernetes_takes(
    changes: dict[str, Any], kinds: set[str], version: str
) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="outrider[manifests]")
    documents = rendered(changes)
    for document in documents:
        kubernetes.validate(document, version, strict=True)
    found = {document["kind"]: document for document in documents}
    assert kinds | {"Deployment", "Service", "ConfigMap"} <= set(found)
    (gateway,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    (engines,) = (arg for arg in gateway["args"] if arg.startswith("--engines="))
    assert is_looked_up(engines.removeprefix("--engines="))
    if "address" not in changes.get("engines", {}):
        named = found["StatefulSet"]["spec"]["serviceName"]
        assert engines == f"--engines=dns://{named}.prod.svc:7600"
    assert tomllib.loads(found["ConfigMap"]["data"]["outrider.toml"])


def rendered(changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The chart's manifests with these values; skips where Helm's library is not installed."""
    helm = pytest.importorskip("helm_python", reason="pip install 'outrider[manifests]'")
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema({**MODELS, **changes})
        files = chart.render({**MODELS, **changes}, name="demo", namespace="prod")
    assert "prod.svc:8000" in files["outrider/templates/NOTES.txt"]
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one is not None]


OPTIONAL = {
    "gateway": {
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "host": "llm.example.com",
            "tlsSecret": "llm-tls",
            "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
        },
        "networkPolicy": {"enabled": True},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "engines": {"maxUnavailable": 1},
}


def test_nothing_optional_is_rendered_unless_it_is_wanted() -> None:
    plain = [(one["kind"], one["metadata"]["name"]) for one in rendered({})]
    more = [(one["kind"], one["metadata"]["name"]) for one in rendered(OPTIONAL)]
    assert sorted(set(more) - set(plain)) == [
        ("Ingress", "demo-gateway"),
        ("NetworkPolicy", "demo-gateway"),
        ("PodDisruptionBudget", "demo-engines"),
        ("ServiceMonitor", "demo-gateway"),
    ]
    assert set(plain) < set(more)


@pytest.mark.parametrize("version", KUBERNETES)
def test_what_is_optional_points_to_the_gateways(version: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="outrider[manifests]")
    documents = rendered(OPTIONAL)
    for document in documents:
        if document["kind"] != "ServiceMonitor":  # which Kubernetes itself has not
            kubernetes.validate(document, version, strict=True)
    found = {(one["kind"], one["metadata"]["name"]): one for one in documents}
    service = found["Service", "demo-gateway"]
    (port,) = service["spec"]["ports"]
    (rule,) = found["Ingress", "demo-gateway"]["spec"]["rules"]
    assert rule["host"] == "llm.example.com"
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": "demo-gateway", "port": {"name": port["name"]}}
    policy = found["NetworkPolicy", "demo-gateway"]["spec"]
    pods = found["Deployment", "demo-gateway"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= pods.items()
    (rule,) = policy["ingress"]
    assert rule == {"from": [{"podSelector": {}}], "ports": [{"port": "http"}]}
    monitor = found["ServiceMonitor", "demo-gateway"]
    labels = service["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
    budget = found["PodDisruptionBudget", "demo-engines"]["spec"]
    pods = found["StatefulSet", "demo-engines"]["spec"]["template"]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"].items() <= pods.items()


def test_helm_finds_nothing_wrong_and_refuses_what_is_misspelt() -> None:
    helm = pytest.importorskip("helm_python", reason="pip install 'outrider[manifests]'")
    with helm.Chart.load(str(CHART)) as chart:
        for wrong in (
            {},
            {**MODELS, "engines": {"gpu": 1}},
            {**MODELS, "image": {"tag": "a b"}},
            {**MODELS, "gateway": {"ingress": {"enabled": True}}},
        ):
            with pytest.raises(helm.HelmError):
                chart.validate_schema(wrong)


# ---- KubeRay ----------------------------------------------------------------------------------


def service() -> dict[str, Any]:
    text = (DEPLOY / "kuberay" / "rayservice.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def application() -> dict[str, Any]:
    (found,) = yaml.safe_load(service()["spec"]["serveConfigV2"])["applications"]
    return dict(found)


def plan() -> FleetPlan:
    return parse_plan(application()["args"], "args")


def test_the_rayservice_has_a_plan_and_its_settings_are_settings() -> None:
    (engine,) = plan().engines.values()
    assert load_settings(environ={}, flags=engine.settings).engine.device == "cuda"
    module, _, name = application()["import_path"].partition(":")
    path = module.removeprefix("outrider.").replace(".", "/")
    source = (ROOT / f"{path}.py").read_text()
    assert f"def {name}(" in source


def test_the_rayservices_pods_have_the_plans_devices_key_and_time() -> None:
    (engine,) = plan().engines.values()
    cluster = service()["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["maxReplicas"] >= engine.max_replicas
    for pod in (cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]):
        (container,) = pod["containers"]
        (mounted,) = (m for m in container["volumeMounts"] if m["name"] == "key")
        assert str(plan().key) == f"{mounted['mountPath']}/fleet.key"
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
        assert container["image"].endswith(f":{cluster['rayVersion']}")
    assert float(container["resources"]["limits"]["nvidia.com/gpu"]) == engine.num_gpus
    assert float(container["resources"]["requests"]["cpu"]) >= engine.num_cpus
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > engine.drain_timeout_s
    assert f"ray=={cluster['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
    image = (DEPLOY / "kuberay" / "Dockerfile").read_text()
    assert f"rayproject/ray:{cluster['rayVersion']}-py311" in image
    copied = set(re.findall(r"^COPY --chown=ray (\w+) ", image, re.MULTILINE))
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert copied == packages - {"docs"}


def test_kubernetes_takes_the_rayservices_pods() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="outrider[manifests]")
    cluster = service()["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        kubernetes.validate(pod, KUBERNETES[0], strict=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ray_serve_takes_the_rayservices_configuration() -> None:
    """Importing Ray takes seconds."""
    schema = pytest.importorskip("ray.serve.schema", reason="pip install 'outrider[fleet]'")
    config = yaml.safe_load(service()["spec"]["serveConfigV2"])
    (found,) = schema.ServeDeploySchema.model_validate(config).applications
    assert found.import_path == "outrider.gateway.wiring.ray.application:fleet"


# ---- two machines -----------------------------------------------------------------------------


def test_the_engine_and_its_gateway_meet_by_key_and_port() -> None:
    texts = {
        name: (DEPLOY / f"compose.{name}.yaml").read_text(encoding="utf-8")
        for name in ("engine", "gateway")
    }
    found = {name: yaml.safe_load(text) for name, text in texts.items()}
    engine = found["engine"]["services"]["engine"]
    for compose in found.values():
        assert compose["secrets"] == {"fleet_key": {"file": "./secrets/fleet.key"}}
        (service,) = compose["services"].values()
        assert service["secrets"] == ["fleet_key"]
        assert any(word.endswith("key=/run/secrets/fleet_key") for word in service["command"])
    assert set(found["gateway"]["services"]) <= set(
        yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    )
    (port,) = engine["ports"]
    assert port.endswith("127.0.0.1:7600}:7600")  # on loopback, unless it is said where
    assert "--listen=tcp://0.0.0.0:7600" in engine["command"]
    assert "7600" in engine["healthcheck"]["test"][-1]
    time_s = float(engine["environment"]["OUTRIDER_SERVER__DRAIN_TIMEOUT_S"])
    assert float(engine["stop_grace_period"].removesuffix("s")) > time_s
    assert engine["read_only"]
    assert engine["cap_drop"] == ["ALL"]
    assert engine["mem_limit"]
    assert {volume.split(":")[0] for volume in engine["volumes"]} == set(found["engine"]["volumes"])
