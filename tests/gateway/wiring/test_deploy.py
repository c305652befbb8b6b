"""The files in deploy/ say what the program does: metrics, settings, paths, signals."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from outrider.engine.events import EngineStats, TierStats
from outrider.gateway.engines.fleet.answer_audits import AuditPolicy
from outrider.gateway.engines.fleet.fleet_metrics import FleetMetrics
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.experiments.controller import ControllerMetrics
from outrider.gateway.experiments.feedback import FeedbackDesk
from outrider.gateway.experiments.left_out import LeftOut
from outrider.gateway.experiments.measure_store import MeasureStore
from outrider.gateway.experiments.recent import RecentRequests
from outrider.gateway.experiments.slo.goodput import GoodputSink
from outrider.gateway.http.apis.batches.metrics import BatchMetrics
from outrider.gateway.http.edge.edge_metrics import EdgeMetrics
from outrider.gateway.http.server.draining import Draining, watch_draining
from outrider.gateway.http.server.route_metrics import RouteCollector
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.storage.database import Database
from outrider.gateway.telemetry.loop_lag import LoopLag
from outrider.gateway.telemetry.otel import SpanCounts
from outrider.gateway.tenancy.keys.key_metrics import TenantMetrics
from outrider.gateway.tenancy.keys.loopback import listen_host
from outrider.gateway.tenancy.ledger.ledger_metrics import LedgerMetrics
from outrider.gateway.tenancy.limits.limit_metrics import LimitMetrics
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics, engine_families
from outrider.gateway.tools.commands.command_parts import tier_flags
from outrider.gateway.tools.commands.doctor.gpu_compiler import triton_of_torch
from outrider.gateway.upstream.upstream_metrics import UpstreamMetrics

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
IMAGE_EXTRAS = ("engine", "experiments", "postgres", "redis", "otel")
GATEWAY_EXTRAS = ("tokenize", "postgres", "redis", "otel")
METRIC = re.compile(r"\boutrider_[a-z0-9_]+\b")
ENVIRONMENT = re.compile(r"OUTRIDER_[A-Z0-9_]+")


def parsed(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


class _Guard:
    """A router's guard that knows every number."""

    def numbers(self) -> Any:
        class All:
            def __getattr__(self, name: str) -> float:
                return 1.0

        return All()


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Names of all samples that /metrics can have, each with its labels."""
    metrics = GatewayMetrics()
    registry = metrics.registry
    EdgeMetrics(registry)
    BatchMetrics(registry)
    LedgerMetrics(registry)
    LimitMetrics(registry)
    TenantMetrics(registry)
    UpstreamMetrics(registry)
    LoopLag(registry)
    GoodputSink(("short-chat",), clock=lambda: 0.0, registry=registry)
    ControllerMetrics(registry)
    LeftOut(registry, clock=lambda: 0.0)
    FeedbackDesk(RecentRequests(), MeasureStore(Database(None)), None, registry)
    SpanCounts(registry)
    registry.register(RouteCollector(_Guard()))  # type: ignore[arg-type]
    watch_draining(Draining(), registry)
    registry.register(FleetMetrics(EnginePool(audits=AuditPolicy(share=0.5))))
    stats = EngineStats(tiers={"small": TierStats(), "large": TierStats()})
    families = [(family, getattr(family, "_labelnames", ())) for family in engine_families(stats)]
    for collector in set(registry._collector_to_names):
        names = getattr(collector, "_labelnames", ())
        families += [
            (family, (*names, *getattr(family, "_labelnames", ())))
            for family in collector.collect()
        ]
    found: dict[str, set[str]] = {}
    for family, names in families:
        labels = set(names).union(*(sample.labels for sample in family.samples))
        for suffix in _suffixes(family.type):
            found.setdefault(family.name + suffix, set()).update(labels)
    return found


def _suffixes(kind: str) -> tuple[str, ...]:
    return {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(kind, ("",))


def expressions() -> Iterator[tuple[str, str]]:
    """Every query of the dashboard and of the alerts, with where it stands."""
    dashboard = json.loads((DEPLOY / "grafana/outrider.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]
    for group in parsed("prometheus/alerts.yml")["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


def test_every_metric_that_is_asked_for_is_exported(exported: dict[str, set[str]]) -> None:
    asked = {name for _, expr in expressions() for name in METRIC.findall(expr)}
    assert len(asked) > 45
    assert not asked - set(exported)


def test_every_label_that_is_asked_for_is_there(exported: dict[str, set[str]]) -> None:
    of_prometheus = {"job", "instance", "le"}
    selector = re.compile(r"(outrider_[a-z0-9_]+)\{([^}]*)\}")
    num_checked = 0
    for where, expr in expressions():
        names = METRIC.findall(expr)
        known = set.union(of_prometheus, *(exported[name] for name in names))
        for grouped in re.findall(r"\bby \(([^)]*)\)", expr):
            labels = {label.strip() for label in grouped.split(",")} - {""}
            assert labels <= known, (where, labels - known)
        for name, inside in selector.findall(expr):
            labels = set(re.findall(r"(\w+)\s*[=!]~?\"", inside))
            assert labels <= of_prometheus | exported[name], (where, name, labels)
            num_checked += 1
    assert num_checked > 60


def test_queries_are_well_formed() -> None:
    for where, expr in expressions():
        for opening, closing in ("()", "{}", "[]"):
            assert expr.count(opening) == expr.count(closing), where
        # A counter without a rate only grows; a rate of a gauge means nothing.
        for name in METRIC.findall(expr):
            is_counter = name.endswith(("_total", "_bucket", "_count"))
            if "label_values" not in expr:
                rated = re.search(rf"(?:rate|increase)\({name}\b", expr)
                assert bool(rated) == is_counter, (where, name)


def test_the_dashboards_panels_do_not_overlap() -> None:
    dashboard = json.loads((DEPLOY / "grafana/outrider.json").read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) > 40
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"]
            assert all(target["legendFormat"] for target in panel["targets"])


def settings_in(text: str) -> set[str]:
    return set(ENVIRONMENT.findall(text)) - {"OUTRIDER_BIND", "OUTRIDER_MEMORY"}


def test_settings_of_the_image_and_of_compose_are_settings() -> None:
    image = dict(re.findall(r"(OUTRIDER_\w+)=(\S+)", (DEPLOY / "Dockerfile").read_text()))
    compose = parsed("compose.yaml")["services"]["gateway"]["environment"]
    environ = {**image, **compose}
    environ["OUTRIDER_DATABASE_URL"] = "postgresql://outrider:x@postgres:5432/outrider"
    assert settings_in((DEPLOY / "compose.yaml").read_text()) <= set(environ)
    settings = load_settings(environ=environ)
    assert settings.telemetry.log_format == "json"
    # Keys are wanted even while there is none, so that the port may be open.
    assert listen_host(settings, has_keys=False) == ("0.0.0.0", None)
    server = settings.server
    grace = parsed("compose.yaml")["services"]["gateway"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > server.drain_grace_s + server.drain_timeout_s


# ---- the image --------------------------------------------------------------------------------


def instructions(name: str = "Dockerfile") -> list[tuple[str, str]]:
    """The Dockerfile's instructions and their arguments, lines joined."""
    text = (DEPLOY / name).read_text(encoding="utf-8")
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    lines = kept.replace("\\\n", " ").splitlines()
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines) if word
    ]


def last(name: str) -> str:
    return [rest for word, rest in instructions() if word == name][-1]


def test_the_image_runs_as_nobody_and_gets_the_signals() -> None:
    known = (
        r"ARG|FROM|ENV|RUN|WORKDIR|COPY|USER|VOLUME|EXPOSE|STOPSIGNAL|HEALTHCHECK|ENTRYPOINT|CMD"
    )
    assert all(re.fullmatch(known, word) for word, _ in instructions())
    assert last("USER") == "10001:10001"
    assert last("STOPSIGNAL") == "SIGTERM"
    # The forms without a shell: it would keep the signals for itself.
    assert json.loads(last("ENTRYPOINT")) == ["outrider"]
    assert json.loads(last("CMD")) == ["serve"]
    check = last("HEALTHCHECK")
    assert "/health'" in check
    assert "--start-period" in check
    assert isinstance(json.loads(check.partition(" CMD ")[2]), list)
    words = [word for word, _ in instructions()]
    assert words.index("USER") > max(i for i, word in enumerate(words) if word == "RUN")
    assert all(":" in rest for word, rest in instructions() if word == "ARG" and "IMAGE" in rest)
    assert "ADD" not in words


def test_triton_has_a_compiler_and_a_folder_in_the_image_and_under_the_unit() -> None:
    final = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").rpartition("FROM ")[2]
    assert re.search(r"apt-get install .* gcc libc6-dev", final)
    assert re.search(r"^ +TRITON_CACHE_DIR=/var/lib/outrider/triton ", final, re.MULTILINE)
    assert '"/var/lib/outrider"' in last("VOLUME")
    assert "TRITON_CACHE_DIR=/var/lib/outrider/triton" in unit()["Environment"]
    assert (
        "gateway-state:/var/lib/outrider"
        in parsed("compose.yaml")["services"]["gateway"]["volumes"]
    )


def test_the_image_has_every_package_and_no_secret() -> None:
    copied = {rest.split()[0] for word, rest in instructions() if word == "COPY"}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert {path for path in packages if (ROOT / path).is_dir()} <= copied
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored
    sent = {line[1:] for line in ignored if line.startswith("!")}
    sources = {
        part for word, rest in instructions() if word == "COPY" for part in rest.split()[:-1]
    }
    assert {part for part in sources if not part.startswith(("--", "/"))} == sent
    assert all((ROOT / part).exists() for part in sent)


def test_torch_comes_from_the_index_that_is_asked_for() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^ARG TORCH_INDEX=$", text, re.MULTILINE)
    assert "${TORCH_INDEX:+" in text
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.mark.slow
def test_triton_of_the_image_and_of_make_is_the_one_that_fits_torch() -> None:
    """Builds for CUDA ask for a version of their own, which the CPU's constraint contradicts."""
    (install,) = [rest for word, rest in instructions() if word == "RUN" and "pip check" in rest]
    makes = (ROOT / ".ci" / "install").read_text()
    assert '--constraint "constraints-${BUILD}.txt"' in install
    assert '--constraint "constraints-$build.txt"' in makes
    for text in (install, makes):
        assert "pip show torch | grep -q '^Requires:.*triton'; then" in text
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "show", "torch"], capture_output=True, text=True, check=True
    )
    needs = re.search(r"^Requires:.*triton", shown.stdout, re.MULTILINE)
    build = "cuda" if needs else "cpu"
    asked = triton_of_torch()
    assert (asked is not None) == (build == "cuda")
    (held,) = pins(f"constraints-{build}.txt").values()
    assert asked is None or asked.specifier.contains(held)


# What torch's wheels for CUDA ask for, from their METADATA (Requires-Dist); also those of other
# versions that the code is to run with.
TRITON_OF_TORCH = {
    "2.11.0": "==3.6.0", "2.12.0": "==3.7.0", "2.12.1": "==3.7.1", "2.13.0": "==3.7.1",
    "2.14.0": "~=3.8.0", "2.14.1": "~=3.8.0",
}  # fmt: skip


def pins(name: str) -> dict[str, str]:
    """Versions by package, of a file of constraints."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_constraints_for_cuda_have_the_triton_that_torchs_wheel_asks_for() -> None:
    torch_version = pins("constraints.txt")["torch"]
    assert torch_version in TRITON_OF_TORCH, "look at the wheel's Requires-Dist and add a line"
    assert "triton" not in pins("constraints.txt")
    held = pins("constraints-cuda.txt")
    assert held.keys() == pins("constraints-cpu.txt").keys() == {"triton"}
    assert SpecifierSet(TRITON_OF_TORCH[torch_version]).contains(held["triton"])


def test_wheels_of_the_image_are_named_by_their_hashes() -> None:
    """All but torch, which comes from the index that is asked for, and its triton."""
    lines = (DEPLOY / "requirements-x86_64.txt").read_text().splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    pattern = re.compile(r"([a-z0-9-]+)==([\w.]+) --hash=sha256:[0-9a-f]{64}")
    found = [pattern.fullmatch(line) for line in listed]
    versions = {match[1]: match[2] for match in found if match}
    assert len(versions) == len(listed) > 80
    held = pins("constraints.txt")
    assert {name: held[name] for name in versions.keys() & held} == {
        name: versions[name] for name in versions.keys() & held
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(each for extra in (*IMAGE_EXTRAS, "tokenize", "transformers") for each in extras[extra]),
    ]
    names = {re.split(r"[\[>=;]", each)[0] for each in wanted}
    assert names - versions.keys() == {"torch", "outrider"}  # and its extras
    runs = " ".join(rest for word, rest in instructions() if word == "RUN")
    assert "--require-hashes --no-deps" in runs
    assert f".[{','.join(IMAGE_EXTRAS)}]" in runs
    assert "--no-build-isolation" in runs  # else a setuptools of any version is fetched


def test_the_gateways_image_is_small_and_otherwise_as_the_engines() -> None:
    """Its wheels are some of the engine's, by the same hashes; it runs in the same way."""
    listed = (DEPLOY / "requirements-gateway-x86_64.txt").read_text().splitlines()
    wheels = {line for line in listed if not line.startswith("#")}
    assert wheels < set((DEPLOY / "requirements-x86_64.txt").read_text().splitlines())
    names = {line.partition("==")[0] for line in wheels}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(e for extra in GATEWAY_EXTRAS for e in extras[extra])]
    assert {re.split(r"[\[>=;]", each)[0] for each in wanted} | {"setuptools"} <= names
    heavy = {"torch", "triton", "transformers", "scipy", "scikit-learn", "llguidance", "regex"}
    assert not names & heavy
    own = instructions("Dockerfile.gateway")
    assert ("ARG", f"EXTRAS={','.join(GATEWAY_EXTRAS)}") in own
    runs = " ".join(rest for word, rest in own if word == "RUN")
    assert "--require-hashes --no-deps" in runs
    assert "torch" not in runs
    for word in ("USER", "STOPSIGNAL", "ENTRYPOINT", "CMD", "VOLUME", "EXPOSE", "WORKDIR"):
        assert [rest for each, rest in own if each == word][-1] == last(word)
    (ours,) = [rest.split() for word, rest in own if word == "ENV" and "OUTRIDER_" in rest]
    (theirs,) = [rest.split() for w, rest in instructions() if w == "ENV" and "OUTRIDER_" in rest]
    assert set(theirs) - set(ours) == {"TRITON_CACHE_DIR=/var/lib/outrider/triton"}
    copied = {rest for word, rest in instructions() if word == "COPY" and rest.endswith("/.")}
    assert copied <= {rest for word, rest in own if word == "COPY"}
    ignored = (DEPLOY / "Dockerfile.gateway.dockerignore").read_text().splitlines()
    sources = {part for word, rest in own if word == "COPY" for part in rest.split()[:-1]}
    sent = {line[1:] for line in ignored if line.startswith("!")}
    assert {part for part in sources if not part.startswith(("--", "/"))} == sent


def test_the_gateways_image_holds_little_that_it_does_not_run() -> None:
    """pip compiles nothing; a run does, with settings that are valid."""
    runs = [rest for word, rest in instructions("Dockerfile.gateway") if word == "RUN"]
    installs = re.findall(r"pip install (\S+)", " ".join(runs))
    assert set(installs) == {"--no-compile", '"setuptools>=77";'}
    (served,) = [run for run in runs if " serve " in run]
    assert "PYTHONDONTWRITEBYTECODE= timeout --preserve-status" in served
    words = served.partition(" serve ")[2].split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    tiers = tier_flags([options.pop("--tier")])
    models = {f"models.{name[2:]}": value for name, value in options.items()}
    assert not load_settings(flags={**models, **tiers}, environ={}).models.is_any


def test_gateways_take_the_small_image_and_engines_the_other() -> None:
    """compose.yaml's gateway runs the models itself."""
    images = {
        (file, service): options["image"]
        for file in ("compose.yaml", "compose.gateway.yaml", "compose.engine.yaml")
        for service, options in parsed(file)["services"].items()
        if service in ("gateway", "engine")
    }
    assert images == {
        ("compose.yaml", "gateway"): "outrider:latest",
        ("compose.gateway.yaml", "gateway"): "outrider-gateway:latest",
        ("compose.engine.yaml", "engine"): "outrider:latest",
    }
    build = parsed("compose.gateway.yaml")["services"]["gateway"]["build"]
    assert build == {"dockerfile": "deploy/Dockerfile.gateway"}
    templates = DEPLOY / "helm" / "outrider" / "templates"
    for file, name in (("gateway.yaml", "gatewayImage"), ("engines.yaml", "image")):
        found = re.findall(r'image: \{\{ include "outrider\.(\w+)"', (templates / file).read_text())
        assert found == [name]


# ---- compose ----------------------------------------------------------------------------------


def test_compose_names_what_is_there() -> None:
    compose = parsed("compose.yaml")
    services = compose["services"]
    assert set(services) == {"gateway", "postgres", "redis", "prometheus", "grafana"}
    for name, service in services.items():
        assert "healthcheck" in service or name == "gateway"  # the image has its own
        assert "no-new-privileges:true" in service["security_opt"]
        assert set(service["networks"]) <= set(compose["networks"])
        assert not re.search(r":latest$|^[^:]+$", service["image"]) or name == "gateway"
        for other, condition in service.get("depends_on", {}).items():
            assert other in services
            assert condition == {"condition": "service_healthy"}
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            is_file = source.startswith(".")
            assert (DEPLOY / source).exists() if is_file else source in compose["volumes"]
            assert volume.endswith(":ro") if is_file else True
    assert compose["networks"]["back"]["internal"]
    for name in ("postgres", "redis", "prometheus"):
        assert "ports" not in services[name]
        assert services[name]["networks"] == ["back"]
    for name in ("gateway", "grafana"):
        assert all("127.0.0.1:" in port for port in services[name]["ports"])
    assert services["gateway"]["read_only"]
    assert services["gateway"]["cap_drop"] == ["ALL"]
    policy = services["redis"]["command"]
    assert policy[policy.index("--maxmemory-policy") + 1] == "noeviction"


def test_gpus_are_given_to_the_gateway_alone() -> None:
    added = parsed("compose.gpu.yaml")["services"]
    assert set(added) == {"gateway"}
    assert load_settings(environ=added["gateway"]["environment"]).engine.device == "cuda"
    (device,) = added["gateway"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_every_image_can_be_pinned_by_its_digest() -> None:
    """A tag can be moved to another image; compose and the Dockerfile take name@sha256:digest."""
    services = parsed("compose.yaml")["services"]
    for name, service in services.items():
        if name != "gateway":
            variable = f"{name.upper()}_IMAGE"
            assert re.fullmatch(rf"\$\{{{variable}:-[\w./-]+:[\w.-]+\}}", service["image"])
    bases = [rest.split()[0] for word, rest in instructions() if word == "FROM"]
    assert set(bases) == {"${PYTHON_IMAGE}"}
    default = next(rest for word, rest in instructions() if rest.startswith("PYTHON_IMAGE="))
    assert default.partition("=")[2] in services["gateway"]["build"]["args"]["PYTHON_IMAGE"]


def test_every_container_has_bounds() -> None:
    services = parsed("compose.yaml")["services"]
    for name, service in services.items():
        assert "mem_limit" in service, name
        assert service["pids_limit"] > 0, name
    assert services["gateway"]["ulimits"]["core"] == 0
    for name in ("gateway", "redis", "prometheus"):
        assert services[name]["read_only"], name


def test_no_password_is_written_down() -> None:
    num_found = 0
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            found = re.findall(r"^\s*\"?(\w*PASSWORD\w*)\"?\s*[:=]\s*(\S+)", text, re.MULTILINE)
            for name, value in found:
                assert value.startswith("${"), (path.name, name)
                num_found += 1
            assert not re.search(r"://[^\s/:$]+:[^\s/@$]+@", text), path.name
    assert num_found == 2


# ---- prometheus and grafana -------------------------------------------------------------------


def test_prometheus_scrapes_the_gateway() -> None:
    config = parsed("prometheus/prometheus.yml")
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["gateway:8000"]}]
    secret = job["authorization"]["credentials_file"]
    assert secret == "/run/secrets/metrics_key"
    assert "metrics_key" in parsed("compose.yaml")["services"]["prometheus"]["secrets"]
    mounted = parsed("compose.yaml")["services"]["prometheus"]["volumes"]
    assert all((DEPLOY / "prometheus" / name).exists() for name in config["rule_files"])
    assert any(volume.endswith("/alerts.yml:ro") for volume in mounted)
    for group in parsed("prometheus/alerts.yml")["groups"]:
        for rule in group["rules"]:
            assert set(rule["annotations"]) == {"summary", "action"}
            assert rule["labels"]["severity"] in ("page", "ticket")


def test_grafana_finds_the_dashboard_and_the_data() -> None:
    (source,) = parsed("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = parsed("grafana/provisioning/dashboards/outrider.yaml")["providers"]
    folder = provider["options"]["path"]
    mounted = parsed("compose.yaml")["services"]["grafana"]["volumes"]
    assert f"./grafana/outrider.json:{folder}/outrider.json:ro" in mounted


# ---- systemd ----------------------------------------------------------------------------------


def unit() -> dict[str, list[str]]:
    """The unit's settings; several of one name are several values."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "outrider.service").read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_lets_the_gateway_drain() -> None:
    found = unit()
    assert found["KillMode"] == ["mixed"]  # the engine's process is the gateway's to end
    assert found["KillSignal"] == ["SIGTERM"]
    server = load_settings(environ={}).server
    assert int(found["TimeoutStopSec"][0]) > server.drain_grace_s + server.drain_timeout_s
    assert found["StateDirectory"] == ["outrider"]
    assert {"XDG_STATE_HOME=/var/lib", "XDG_CACHE_HOME=/var/cache"} <= set(found["Environment"])
    assert "Documentation" not in found, "no file is installed that it could name"
    assert found["RestartPreventExitStatus"] == ["2"]


def test_the_unit_bounds_what_the_gateway_takes() -> None:
    found = unit()
    assert found["MemoryMax"] == ["80%"]
    assert found["MemorySwapMax"] == ["0"]
    assert int(found["TasksMax"][0]) <= 4096
    assert found["LimitCORE"] == ["0"]  # a dump would hold keys and prompts
    assert found["OOMPolicy"] == ["continue"]  # the gateway starts its engine again
    for name in ("NoNewPrivileges", "PrivateTmp", "PrivateDevices", "ProtectHome"):
        assert found[name] == ["yes"]
    assert found["ProtectSystem"] == ["strict"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not there")
def test_systemd_takes_the_unit_and_finds_it_safe(tmp_path: Path) -> None:
    text = (DEPLOY / "outrider.service").read_text(encoding="utf-8")
    path = tmp_path / "outrider.service"
    path.write_text(text.replace("/opt/outrider/bin/outrider serve", "/bin/true serve"))
    assert "/bin/true" in path.read_text()
    for command in (["verify"], ["security", "--offline=true", "--threshold=25"]):
        result = subprocess.run(
            ["systemd-analyze", *command, str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        if command == ["verify"]:
            assert not result.stderr.strip()


def test_the_scrapers_key_may_read_metrics() -> None:
    made = [
        line
        for file in DEPLOY.rglob("*")
        if file.suffix in {".yaml", ".yml"}
        for line in file.read_text(encoding="utf-8").splitlines()
        if "keys create" in line and "prometheus" in line
    ]
    assert len(made) == 2
    assert all("--metrics" in line for line in made)
