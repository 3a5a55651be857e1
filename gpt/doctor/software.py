"""Versions against what the project asks for, and the state of wandb, TensorBoard and tiktoken."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.doctor.report import Finding
from gpt.doctor.trial import Tried

if TYPE_CHECKING:
    from packaging.requirements import Requirement

VERSIONS = "Versions"
AROUND = "Around training"

SHOWN = ("torch", "lightning", "tiktoken", "grpcio", "protobuf")
"""What gets a line of its own even if it is fine."""

MODULES = {
    "googleapis-common-protos": "google.rpc.error_details_pb2",
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health.v1.health",
    "grpcio-reflection": "grpc_reflection.v1alpha.reflection",
    "grpcio-status": "grpc_status.rpc_status",
    "protobuf": "google.protobuf",
    "PyYAML": "yaml",
}
"""The module of each distribution whose name says something else."""


def requirements() -> list[Requirement]:
    """What Antiphon needs to run, from its metadata or, in a checkout, its pyproject.toml.

    Raises:
        LookupError: neither is to be had.
    """
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("antiphon") or []
    except metadata.PackageNotFoundError:
        lines = _of_checkout()
    found = [Requirement(line) for line in lines]
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]


def _of_checkout() -> list[str]:
    try:
        toml: Any = importlib.import_module("tomllib")
    except ModuleNotFoundError:
        raise LookupError("Antiphon is not installed, and Python 3.10 reads no TOML") from None
    path = Path(__file__).parents[2] / "pyproject.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise LookupError("Antiphon is not installed, and this is no checkout of it") from None
    return list(toml.loads(text)["project"]["dependencies"])


def module_of(distribution: str) -> str:
    return MODULES.get(distribution, distribution.replace("-", "_"))


def versions(tried: Mapping[str, Tried]) -> Iterator[Finding]:
    """Antiphon, Python, and each requirement: there, in range, and importable if that was tried."""
    yield _antiphon()
    yield _python()
    fine = []
    for needed in requirements():
        finding = _package(needed, tried.get(module_of(needed.name)))
        if finding.status != "ok" or needed.name in SHOWN:
            yield finding
        else:
            fine.append(f"{needed.name} {finding.facts['version']}")
    if fine:
        yield Finding(VERSIONS, "others", "ok", ", ".join(fine))
    yield _datasets()


def _antiphon() -> Finding:
    try:
        version = metadata.version("antiphon")
    except metadata.PackageNotFoundError:
        return Finding(
            VERSIONS,
            "antiphon",
            "note",
            f"runs from {Path(__file__).parents[2]}, not installed",
            "pip install -e . there puts the command `antiphon` on the path",
        )
    return Finding(
        VERSIONS,
        "antiphon",
        "ok",
        f"{version} in {Path(__file__).parents[1]}",
        facts={"version": version},
    )


def _python() -> Finding:
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    found = f"{version} ({sys.executable}), {platform.platform()}"
    needed = _python_needed()
    if needed and not SpecifierSet(needed).contains(version, prereleases=True):
        advice = f"Antiphon needs Python {needed}: make an environment with another one"
        return Finding(VERSIONS, "python", "broken", found, advice, {"version": version})
    return Finding(VERSIONS, "python", "ok", found, facts={"version": version})


def _python_needed() -> str | None:
    try:
        return metadata.metadata("antiphon")["Requires-Python"]
    except (metadata.PackageNotFoundError, KeyError):
        return None


def _package(needed: Requirement, tried: Tried | None) -> Finding:
    name = needed.name
    install = f"pip install '{needed.name}{needed.specifier}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(VERSIONS, name, "broken", "is not installed", install)
    facts = {"version": version, "needed": str(needed.specifier)}
    asked = f", needs {needed.specifier}" if needed.specifier else ""
    if not needed.specifier.contains(version, prereleases=True):
        return Finding(VERSIONS, name, "broken", f"{version}{asked}", install, facts)
    if tried is not None and tried.error is not None:
        return Finding(
            VERSIONS,
            name,
            "broken",
            f"{version} cannot be imported: {tried.error}",
            f"install it again: pip install --force-reinstall --no-deps '{name}=={version}'",
            facts,
        )
    return Finding(VERSIONS, name, "ok", f"{version}{asked}", facts=facts)


def _datasets() -> Finding:
    try:
        version = metadata.version("datasets")
    except metadata.PackageNotFoundError:
        return Finding(
            VERSIONS,
            "datasets",
            "note",
            "is not installed; only sources that begin with hf: need it",
            "pip install 'antiphon[datasets]'",
        )
    return Finding(VERSIONS, "datasets", "ok", f"{version} (optional: sources hf:NAME)")


def wandb() -> Iterator[Finding]:
    """What a run would do with Weights & Biases; nobody is asked over the network."""
    from gpt.training.wandb_mode import has_wandb_key, wandb_mode

    key = has_wandb_key()
    environment = os.environ.get("WANDB_MODE", "")
    state = f"{'a key is set up' if key else 'no key'}"
    state += f", WANDB_MODE={environment}" if environment else ""
    does = {
        "online": "records online",
        "offline": "records offline, into the run's folder",
        None: "records nothing",
    }
    modes = {wanted: wandb_mode(wanted) for wanted in ("auto", "on", "off")}
    advice = ""
    if modes["auto"] is None:
        advice = (
            "`wandb login` sets up a key; --wandb on, or WANDB_MODE=offline, records without one"
        )
    elif modes["auto"] == "offline":
        advice = "`wandb sync runs/NAME/wandb/offline-run-*` uploads it later"
    yield Finding(
        AROUND,
        "wandb",
        "ok",
        f"{state}: --wandb auto (the default) {does[modes['auto']]}, on {does[modes['on']]}, "
        f"off {does[modes['off']]}",
        advice,
        {"key": key, **modes},
    )


def tensorboard() -> Iterator[Finding]:
    try:
        writer = metadata.version("tensorboardX")
    except metadata.PackageNotFoundError:
        writer = None
    viewer = shutil.which("tensorboard", path=_path_with_scripts())
    yield Finding(
        AROUND,
        "tensorboard",
        "ok" if viewer else "note",
        (f"curves can be written (tensorboardX {writer})" if writer else "tensorboardX is missing")
        + (f", viewer {viewer}" if viewer else "; there is no viewer here"),
        "" if viewer else "pip install tensorboard, to look at the curves on this machine",
        {"writer": writer, "viewer": viewer},
    )


def _path_with_scripts() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def encodings() -> Iterator[Finding]:
    """Which named encodings can be had without a network."""
    from gpt.encodings import CACHE_VARIABLES, ENCODINGS, cache_folder, missing_files

    variable = next((name for name in CACHE_VARIABLES if name in os.environ), None)
    folder = cache_folder()
    where = f"{folder or 'no cache'} ({variable or 'the default, which a restart may empty'})"
    there = [name for name in ENCODINGS if not missing_files(name)]
    missing = [name for name in ENCODINGS if name not in there]
    found = f"{', '.join(there) or 'no named encoding'} in {where}"
    facts = {"folder": folder and str(folder), "there": there, "missing": missing}
    if not missing:
        yield Finding(AROUND, "tiktoken cache", "ok", found, facts=facts)
        return
    yield Finding(
        AROUND,
        "tiktoken cache",
        "note",
        f"{found}; not {', '.join(missing)}",
        "each is downloaded when it is first used; without a network `antiphon tokenize hi "
        f"--tokenizer {missing[0]}` says which files to bring, and TIKTOKEN_CACHE_DIR where they "
        "are. bpe, bytes and chars need none of this",
        facts,
    )
