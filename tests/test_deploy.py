"""Image and manifests agree with the code: packages, paths, ports, flags, probes, times, memory."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gpt.native import build as building
from gpt.size import parameter_count
from gpt.subject import find
from serve.auth import OPEN_TO_ALL
from serve.engines import LAST_STEP_SECONDS
from serve.layers import PREFIX, read
from serve.life import GOODBYE_SECONDS
from serve.memory import size_pool
from serve.probe import build_parser as probe_parser
from serve.server import SECRETS, build_parser, parse
from serve.service import NAME
from serve.settings import ListenSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"
REQUIREMENTS = (ROOT / "deploy" / "requirements.txt").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
MIB = 2**20


def load(name: str) -> Any:
    return yaml.safe_load((KUBERNETES / name).read_text(encoding="utf-8"))


SETTINGS = load("serve.yaml")
DEPLOYMENT = load("deployment.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]


def component(name: str) -> Any:
    """What a component lays over the Deployment's pod."""
    (patch,) = load(f"{name}/kustomization.yaml")["patches"]
    assert patch["target"] == {"kind": "Deployment", "name": DEPLOYMENT["metadata"]["name"]}
    return yaml.safe_load(patch["patch"])["spec"]["template"]["spec"]


# --- The image ----------------------------------------------------------------------------------


def requirements() -> list[str]:
    return [line for line in REQUIREMENTS.splitlines() if not line.startswith("#")]


def test_the_image_gets_the_versions_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=3.10"
    known = project["dependencies"] + project["optional-dependencies"]["tracing"]
    assert [each for each in requirements() if each not in known] == []


DISTRIBUTIONS = {
    "google": "googleapis-common-protos",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "yaml": "PyYAML",
}


def test_the_image_has_all_that_serving_can_import() -> None:
    """However late, from the server's modules on, and those of who asks and looks."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = ["serve.server", "serve.life", "serve.async_client"]
    waiting += ["serve.generate", "serve.probe", "serve.top"]
    while waiting:
        name = waiting.pop()
        path = ROOT.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in seen or not path.is_file():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            for each in names:
                top = each.partition(".")[0]
                if top in ("gpt", "serve"):
                    waiting.append(each)
                elif top not in sys.stdlib_module_names:
                    found.add(DISTRIBUTIONS.get(top, top))
    assert {"serve.engine", "gpt.attention"} <= seen
    has = {re.split(r"[<>=!\[]", line)[0] for line in requirements()}
    assert found - {"typing_extensions"} <= has


def test_what_is_copied_is_there_and_not_ignored() -> None:
    let_in = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    copied = {
        source
        for line in re.findall(r"^COPY (?!--)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    }
    assert copied == let_in
    assert all((ROOT / source).exists() for source in copied)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    tops = {"configs", "protos", *(name.partition(".")[0] for name in packages["packages"])}
    assert tops <= copied


def test_the_image_runs_as_a_number_that_is_not_root_and_its_command_is_one() -> None:
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    user = int(re.findall(r"^ARG USER_ID=(\d+)$", last, re.MULTILINE)[0])
    assert re.findall(r"^USER (.+)$", last, re.MULTILINE) == ["${USER_ID}:${USER_ID}"]
    context = POD["securityContext"]
    assert context["runAsUser"] == context["runAsGroup"] == context["fsGroup"] == user > 0
    entry = yaml.safe_load(re.findall(r"^ENTRYPOINT (.+)$", last, re.MULTILINE)[0])
    command = yaml.safe_load(re.findall(r"^CMD (.+)$", last, re.MULTILINE)[0])
    assert entry == ["antiphon"]
    assert command[0] == "serve"
    settings = parse(command[1:], "antiphon serve")
    assert settings.host == "0.0.0.0"
    ports = [int(port) for port in re.findall(r"^EXPOSE (.+)$", last, re.MULTILINE)[0].split()]
    assert ports == [settings.port, SETTINGS["metrics_port"]]
    assert PREFIX not in re.sub(r"^#.*$", "", DOCKERFILE, flags=re.MULTILINE)


def test_kernels_compiled_for_the_image_need_no_compiler_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "python -P -m gpt.native.build" in DOCKERFILE
    for name in building.SOURCES:
        shutil.copy(ROOT / "gpt" / "native" / name, tmp_path)
    monkeypatch.setattr(building, "__file__", str(tmp_path / "build.py"))
    monkeypatch.setenv("PATH", "")
    for variable in ("CXX", building.SWITCH):
        monkeypatch.delenv(variable, raising=False)
    shipped = building.beside(tmp_path)
    shipped.touch()
    assert building.build() == shipped
    (tmp_path / building.SOURCES[0]).write_text("// others", encoding="utf-8")
    with pytest.raises(building.NotBuiltError, match="no C\\+\\+ compiler"):
        building.build()


# --- Manifests ----------------------------------------------------------------------------------


def settings_in_the_pod(*components: str) -> Any:
    """What the server would be told there."""
    variables = {each["name"]: each.get("value", "4") for each in SERVER["env"]}
    for name in components:
        (laid_over,) = component(name)["containers"]
        variables |= {each["name"]: each["value"] for each in laid_over["env"]}
    command, flag, path = SERVER["args"]
    assert (command, flag) == ("serve", "--config")
    assert path.startswith(mounts()["settings"] + "/")
    file = KUBERNETES / Path(path).name
    layered = read(build_parser("p"), ["--config", str(file)], variables, secrets=SECRETS)
    names = ListenSettings.__dataclass_fields__
    ListenSettings(**{name: layered.values[name] for name in names if name in layered.values})
    return layered.values


def mounts() -> dict[str, str]:
    return {each["name"]: each["mountPath"] for each in SERVER["volumeMounts"]}


@pytest.mark.parametrize("components", [(), ("cuda",), ("tls",), ("cuda", "tls")])
def test_the_server_takes_the_settings_and_finds_its_files(components: tuple[str, ...]) -> None:
    values = settings_in_the_pod(*components)
    volumes = {each["name"] for each in POD["volumes"]}
    places = mounts()
    for name in components:
        (laid_over,) = component(name)["containers"]
        assert laid_over["name"] == SERVER["name"]
        volumes |= {each["name"] for each in component(name).get("volumes", [])}
        places |= {each["name"]: each["mountPath"] for each in laid_over.get("volumeMounts", [])}
    assert places.keys() == volumes
    used = [values[name] for name in ("api_keys_file", "tls_cert", "tls_key")]
    used += [source.path for source in values["model"]]
    for path in (path for path in used if path is not None):
        assert any(path.is_relative_to(place) for place in places.values())
    assert (values["tls_cert"] is not None) == ("tls" in components)
    assert values["device"] == ("cuda" if "cuda" in components else "cpu")
    assert values["threads"] == 4
    if "tls" not in components:
        assert values["host"] == "0.0.0.0", "the kubelet comes from outside"


def test_ports_are_those_that_the_server_listens_on() -> None:
    ports = {each["name"]: each["containerPort"] for each in SERVER["ports"]}
    assert ports == {"grpc": SETTINGS["port"], "metrics": SETTINGS["metrics_port"]}
    service = load("service.yaml")["spec"]
    assert service["clusterIP"] == "None", "headless"
    assert service["ports"] == [{"name": "grpc", "port": SETTINGS["port"], "targetPort": "grpc"}]
    notes = DEPLOYMENT["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(SETTINGS["metrics_port"])


def test_probes_ask_for_services_that_health_knows_and_need_no_key() -> None:
    known = ("", NAME)  # those of `serve.life.Listener`
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = SERVER[kind]["grpc"]
        assert probe["port"] == SETTINGS["port"]
        assert probe.get("service", "") in known
        (laid_over,) = component("tls")["containers"]
        assert laid_over[kind]["grpc"] is None
        program, command, *flags = laid_over[kind]["exec"]["command"]
        assert (program, command) == ("antiphon", "ready")
        asked = probe_parser(command).parse_args(flags)
        assert asked.target == f"127.0.0.1:{SETTINGS['port']}"
        (place,) = (m["mountPath"] for m in laid_over["volumeMounts"] if m["name"] == "tls")
        assert Path(asked.tls_ca).parent == Path(place)
        assert asked.timeout < laid_over[kind]["timeoutSeconds"]
    assert "/grpc.health.v1.Health/".startswith(OPEN_TO_ALL)
    start = SERVER["startupProbe"]
    allowed = start["periodSeconds"] * start["failureThreshold"]
    assert allowed <= DEPLOYMENT["spec"]["progressDeadlineSeconds"]


def test_all_that_happens_at_the_end_fits_into_the_grace_period() -> None:
    command = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    ending = LAST_STEP_SECONDS + 2 * GOODBYE_SECONDS
    needed = int(command[1]) + SETTINGS["drain_seconds"] + ending
    assert needed < POD["terminationGracePeriodSeconds"]
    assert ending < 15, "what docs/operations.md says to add"


def test_labels_select_the_pods() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    budget = load("disruption.yaml")["spec"]
    assert budget["maxUnavailable"] < DEPLOYMENT["spec"]["replicas"]
    for selector in (
        DEPLOYMENT["spec"]["selector"]["matchLabels"],
        load("service.yaml")["spec"]["selector"],
        budget["selector"]["matchLabels"],
    ):
        assert selector == labels


def test_the_pod_may_do_no_more_than_it_needs() -> None:
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["automountServiceAccountToken"] is False
    own = SERVER["securityContext"]
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert all(each.get("readOnly") for each in SERVER["volumeMounts"] if each["name"] != "tmp")


def test_the_kustomization_names_every_file() -> None:
    root = load("kustomization.yaml")
    named = {*root["resources"], *root["configMapGenerator"][0]["files"], "kustomization.yaml"}
    assert named == {path.name for path in KUBERNETES.glob("*.yaml")}
    names = {root["configMapGenerator"][0]["name"], "antiphon-keys"}
    volumes = [{**v.get("configMap", {}), **v.get("secret", {})} for v in POD["volumes"]]
    assert {v.get("name") or v.get("secretName") for v in volumes if v} == names


# --- The page -----------------------------------------------------------------------------------


def test_commands_of_the_page_that_are_not_run_have_flags_that_there_are() -> None:
    (text,) = re.findall(r"```text\n(docker build.+?)```", PAGE, re.DOTALL)
    arguments = re.findall(r"--build-arg (\w+)=", text)
    declared = re.findall(r"^ARG (\w+)=", DOCKERFILE, re.MULTILINE)
    assert set(arguments) <= set(declared)
    served = re.findall(r"^ +(serve .+)$", text, re.MULTILINE)
    assert [parse(shlex.split(line)[1:], "p").device for line in served] == ["cuda"]
    (own,) = re.findall(r'```yaml title="kustomization.yaml"\n(.+?)```', PAGE, re.DOTALL)
    for path in [*yaml.safe_load(own)["resources"], *yaml.safe_load(own)["components"]]:
        assert (ROOT / path.removeprefix("antiphon/") / "kustomization.yaml").is_file()


def test_the_worked_example_is_what_the_code_gives_and_fits_into_the_pod() -> None:
    config = find("gpt2-124m").config
    values = settings_in_the_pod()
    chunk = values["prefill_chunk"]
    pool = size_pool(
        config,
        page_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_running=values["max_running"],
        prefill_chunk=chunk,
        budget=int(values["kv_cache_gb"] * 2**30),
    )
    pages = pool.n_pages[0] - 1
    weights = 4 * parameter_count(config)
    workspace = pool.bytes / config.n_layer + 2 * chunk * config.vocab_size * 4
    libraries = int(re.findall(r"\| libraries \| (\d+) MiB", PAGE)[0])
    rows = {
        "libraries": f"{libraries}",
        "weights": f"{weights / MIB:,.0f}",
        "KV cache": f"{pool.bytes / MIB:,.0f}",
        "workspace": f"{workspace / MIB:,.0f}",
    }
    rows["together"] = f"{sum(int(row.replace(',', '')) for row in rows.values()):,}"
    found = dict(re.findall(r"^\| ([\w ]+) \|[^|]*\| ([\d,]+) \|$", PAGE, re.MULTILINE))
    assert found == rows
    assert f"{parameter_count(config):,} parameters × 4" in PAGE
    assert f"{pages:,} pages of 16 tokens × {pool.page_bytes[0] // 16 // 1024} KiB" in PAGE
    assert f"{16 * pages:,} tokens, {16 * pages / 1024:.1f} full contexts" in PAGE
    whole = 32 * 1024 * pool.page_bytes[0] / 16 / MIB  # the one that was measured
    rule = libraries + weights / MIB + 2305 + 2305 / config.n_layer
    rule += 2 * chunk * config.vocab_size * 4 / MIB
    assert whole == pytest.approx(2305, abs=1.2)
    assert f"where the rule says {rule:,.0f}" in PAGE
    limit = SERVER["resources"]["limits"]["memory"]
    needed = libraries * MIB + weights + pool.bytes + workspace
    assert int(limit.removesuffix("Gi")) * 2**30 >= 1.5 * needed
