"""The `antiphon serve` command: its settings, and what it loads. `serve.life` runs the process."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.arguments import CommandParser
from gpt.errors import CheckpointError

if TYPE_CHECKING:
    from serve.engine import Engine

EXAMPLES = """\
examples:
  antiphon serve runs/shakespeare-tiny/model
  antiphon serve runs/shakespeare-tiny/model --port 0 --max-running 8
  antiphon serve model --host 0.0.0.0 --dtype bfloat16 --kv-cache-gb 2

Once ready it prints one line, `serving NAME on HOST:PORT`, on standard output; its log goes to
standard error. Ask it with `antiphon generate --target HOST:PORT --prompt ...`, or from any
language through protos/serve/v1/generation.proto; reflection and grpc.health.v1 are on.
SIGTERM or Ctrl-C lets running requests end and exits with 0; a second one exits at once.
"""


@dataclass(frozen=True)
class Settings:
    """What `antiphon serve` was told.

    Attributes:
        model: model folder, run folder or Lightning checkpoint.
        port: 0 takes a free one.
        kv_cache_gb: budget of the KV cache in GiB; None takes a share of the free memory.
        prefix_cache: whether prompts that begin alike are computed once.
        threads: CPU threads of torch; None leaves its own choice.
        max_waiting_tokens: most tokens that waiting requests may have together.
        drain_seconds: what running requests get after the first signal.
        deterministic: texts do not depend on what else the server does, down to the last bit.
        step_timeout: seconds after which a step counts as stuck and the process ends; 0: never.
    """

    model: Path
    host: str
    port: int
    device: str
    dtype: str
    max_running: int
    max_waiting: int
    max_waiting_tokens: int
    kv_cache_gb: float | None
    prefix_cache: bool
    threads: int | None
    drain_seconds: float
    step_timeout: float
    deterministic: bool


def main(argv: list[str], prog: str = "antiphon serve") -> int:
    """Serve a model until told to stop; returns the exit status.

    Raises:
        UserError: no such model, port taken, not enough memory, no such device.
    """
    settings = parse(argv, prog)
    if not settings.model.exists():  # found out before torch is imported, which takes seconds
        raise CheckpointError(f"no model at {settings.model}: give a model folder or a checkpoint")
    start_log()

    from serve.life import run

    return run(settings, load)


def start_log() -> None:
    """The log of a server process: standard error, one line an event."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    # gRPC's own log repeats in five lines what we say in one; GRPC_VERBOSITY=INFO brings it back.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def load(settings: Settings) -> Engine:
    """Load the model and make an engine for it.

    Raises:
        UserError: see `main`.
    """
    import torch

    from gpt.deterministic import make_deterministic
    from gpt.device import check_device
    from gpt.machine import GIB
    from gpt.native.precision import open_model
    from serve.engine import Engine

    device = check_device(settings.device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    loaded, dtype, why = open_model(
        settings.model, settings.dtype, device, exact=settings.deterministic
    )
    config = loaded.model.config
    log = logging.getLogger(__name__)
    log.info(
        "model %s: %.2f M parameters, context %d, vocabulary %d, %s (%s) on %s, %d threads",
        loaded.name,
        loaded.model.num_params() / 1e6,
        config.block_size,
        loaded.tokenizer.n_vocab,
        str(dtype).removeprefix("torch."),
        why,
        device,
        torch.get_num_threads(),
    )
    if settings.deterministic:
        make_deterministic(loaded.model)
    budget = settings.kv_cache_gb
    return Engine(
        loaded.model,
        loaded.tokenizer,
        name=loaded.name,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        max_waiting_tokens=settings.max_waiting_tokens,
        kv_bytes=None if budget is None else int(budget * GIB),
        prefix_cache=settings.prefix_cache,
        dtype=dtype,
        device=device,
        fixed=settings.deterministic,
    )


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog, description="Answer gRPC requests with a trained model.", epilog=EXAMPLES
    )
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="a model folder, run folder or .ckpt file"
    )
    group = parser.add_argument_group("network")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine only). There is no password: "
        "with 0.0.0.0 whoever can reach the port can use the model",
    )
    group.add_argument(
        "--port",
        type=_number(int, 0, 65535),
        default=50051,
        metavar="N",
        help="0 takes a free one (default: 50051)",
    )
    group.add_argument(
        "--drain-seconds",
        type=_number(float, 0),
        default=30.0,
        metavar="S",
        help="what running requests get to end after SIGTERM or Ctrl-C (default: 30)",
    )
    group = parser.add_argument_group("load")
    group.add_argument(
        "--max-running",
        type=_number(int, 1, 4096),
        default=32,
        metavar="N",
        help="most requests computed together (default: 32)",
    )
    group.add_argument(
        "--max-waiting",
        type=_number(int, 0, 100_000),
        default=256,
        metavar="N",
        help="most requests waiting beyond those; more get RESOURCE_EXHAUSTED (default: 256)",
    )
    group.add_argument(
        "--max-waiting-tokens",
        type=_number(int, 1, 2**31),
        default=2**20,
        metavar="N",
        help="most tokens that waiting requests may have together, likewise (default: 1048576)",
    )
    group.add_argument(
        "--kv-cache-gb",
        type=_number(float, 0, 1e6),
        metavar="X",
        help="memory for the KV cache in GiB (default: what --max-running full contexts take, "
        "up to a quarter of the free memory)",
    )
    group.add_argument(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        help="compute every prompt from its start, also if another began alike; the cache takes no "
        "memory besides (default: prompts start from what is still in the KV cache)",
    )
    group.add_argument(
        "--step-timeout",
        type=_number(float, 0),
        default=300.0,
        metavar="S",
        help="what one step of the model may take; if one takes longer, requests fail, the log "
        "says where it is stuck, and the server exits with 1 (default: 300; 0: no limit)",
    )
    group = parser.add_argument_group("machine")
    group.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or mps (default: cpu)")
    group.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float64"],
        help="precision of weights and cache (default: auto: bfloat16 where it is measured to be "
        "faster, which large models gain from, else float32)",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="make each text the same, to the last bit, whatever else the server does meanwhile; "
        "slower, on the CPU only, and tried out at the start",
    )
    group.add_argument(
        "--threads",
        type=_number(int, 1, 1024),
        metavar="N",
        help="CPU threads of torch (default: its own choice)",
    )
    return parser


def parse(argv: list[str], prog: str) -> Settings:
    return Settings(**vars(build_parser(prog).parse_args(argv)))


class _number:  # noqa: N801 - used like a function; its name shows in no message
    """An argparse type: a number within bounds. Written so that NaN never passes."""

    def __init__(self, kind: type[int] | type[float], low: float, high: float = math.inf) -> None:
        self._kind, self._low, self._high = kind, low, high

    def __call__(self, text: str) -> float:
        try:
            value = self._kind(text)
        except ValueError:
            noun = "a whole number" if self._kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun}") from None
        if not (self._low <= value <= self._high and math.isfinite(value)):
            upper = "" if self._high == math.inf else f" and at most {self._high:g}"
            raise argparse.ArgumentTypeError(f"{text} must be at least {self._low:g}{upper}")
        return value
