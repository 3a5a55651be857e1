"""The `antiphon serve` command: its settings, and what it loads. `serve.life` runs the process."""

from __future__ import annotations

import argparse
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.arguments import CommandParser, add_machine_arguments, add_switch, number
from gpt.errors import CheckpointError, ConfigError
from serve import logs
from serve.folders import ModelSource
from serve.layers import NOT_SETTINGS, Layered, Listed, read, shown, summary
from serve.settings import ListenSettings, add_listen_arguments
from serve.watchflags import WatchSettings, add_watch_arguments

if TYPE_CHECKING:
    from serve.engine import Engine

EXAMPLES = """\
examples:
  antiphon serve runs/shakespeare-tiny/model
  antiphon serve runs/shakespeare-tiny/model --port 0 --max-running 8
  antiphon serve model --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem --api-keys-file keys
  antiphon serve --config serve.yaml --print-config
  antiphon serve runs/notes/model small=runs/shakespeare-tiny/model
  antiphon serve --watch runs/notes
  antiphon serve model --host unix:/run/antiphon.sock --dtype bfloat16 --kv-cache-gb 2

Once ready it prints one line, `serving NAME on HOST:PORT`, on standard output; its log goes to
standard error. Ask it with `antiphon generate --target HOST:PORT --prompt ...`, or from any
language through protos/serve/v1/generation.proto; reflection and grpc.health.v1 are on.
Settings come from flags, variables (ANTIPHON_SERVE_PORT for --port), a YAML file and defaults, in
this order of precedence. SIGHUP takes over models whose files have changed. SIGTERM or Ctrl-C lets
running requests end and exits with 0; a second one exits at once.
"""


SECRETS = ("api_keys",)
"""Settings that are taken from the environment alone: flags and files are seen by too many."""


@dataclass(frozen=True, kw_only=True)
class Settings(ListenSettings, WatchSettings):
    """What `antiphon serve` was told.

    Attributes:
        models: what to serve; the first is the default.
        warmup: run large steps before the first caller comes.
        kv_cache_gb: budget of the KV cache in GiB; None takes a share of the free memory.
        prefix_cache: whether prompts that begin alike are computed once.
        threads: CPU threads of torch; None leaves its own choice.
        max_waiting_tokens: most tokens that waiting requests may have together.
        prefill_chunk: most prompt tokens of one request in one step.
        prefill_stretch: how many times as long a step may take while prompts are read beside texts
            that are being made; 0: as long as a chunk takes.
        drain_seconds: what running requests get after the first signal.
        retire_seconds: what they get on a model that has been replaced.
        deterministic: texts do not depend on what else the server does, down to the last bit.
        step_timeout: seconds after which a step counts as stuck and the process ends; 0: never.
    """

    models: list[ModelSource]
    device: str
    dtype: str
    max_running: int
    max_waiting: int
    max_waiting_tokens: int
    prefill_chunk: int
    prefill_stretch: float
    kv_cache_gb: float | None
    prefix_cache: bool
    threads: int | None
    drain_seconds: float
    retire_seconds: float
    step_timeout: float
    deterministic: bool
    warmup: bool


def main(argv: list[str], prog: str = "antiphon serve") -> int:
    """Serve a model until told to stop; returns the exit status.

    Raises:
        UserError: a setting that cannot be used, no such model, port taken, not enough memory, no
            such device.
    """
    parser = build_parser(prog)
    layered = read(parser, argv, os.environ, secrets=SECRETS)
    if layered.values.get("print_config"):
        print(shown(parser, layered, SECRETS))
        return 0
    settings = _settings(layered)
    for source in settings.models:  # found out before torch is imported, which takes seconds
        if not os.path.exists(source.path):
            raise CheckpointError(f"no model at {source.path}: give a model folder or a checkpoint")
    start_log(settings)
    logging.getLogger(__name__).info("settings: %s", summary(parser, layered))

    from serve.life import run

    return run(settings, load)


def start_log(settings: Settings) -> None:
    """The log of a server process: standard error, one line an event."""
    logs.start(settings.log_format, settings.log_level)


def load(settings: Settings, source: ModelSource, replaces: Engine | None = None) -> Engine:
    """Load a model and make an engine for it.

    Args:
        source: what to load, and what to call it.
        replaces: the engine that goes on until this one takes over: there must be memory for both,
            and the KV cache gets what that one's got.

    Raises:
        UserError: see `main`.
    """
    import torch

    from gpt.deterministic import make_deterministic
    from gpt.device import check_device
    from gpt.machine import GIB
    from gpt.native.precision import open_model
    from serve.engine import Engine
    from serve.memory import DEFAULT_SHARE, check_room_beside

    device = check_device(settings.device)
    if replaces is not None:
        check_room_beside(replaces, device)
    elif settings.threads is not None:
        torch.set_num_threads(settings.threads)
    loaded, dtype, why = open_model(
        source.path, settings.dtype, device, exact=settings.deterministic
    )
    config, name = loaded.model.config, source.name or loaded.name
    log = logging.getLogger(__name__)
    log.info(
        "model %s: %.2f M parameters, context %d, vocabulary %d, %s (%s) on %s, %d threads",
        name,
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
    count = len(settings.models)
    budget = None if settings.kv_cache_gb is None else int(settings.kv_cache_gb * GIB / count)
    if replaces is not None and replaces.pool is not None:
        budget = replaces.pool.budget
    return Engine(
        loaded.model,
        loaded.tokenizer,
        name=name,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        max_waiting_tokens=settings.max_waiting_tokens,
        prefill_chunk=settings.prefill_chunk,
        # How texts are cut would depend on how fast the machine is.
        prefill_stretch=None if settings.deterministic else settings.prefill_stretch or None,
        kv_bytes=budget,
        kv_share=DEFAULT_SHARE / count,
        prefix_cache=settings.prefix_cache,
        dtype=dtype,
        device=device,
        fixed=settings.deterministic,
    )


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog, description="Answer gRPC requests with trained models.", epilog=EXAMPLES
    )
    parser.add_argument(
        "model",
        type=ModelSource.parse,
        action=Listed,
        nargs="*",
        metavar="MODEL",
        help="a model folder, run folder or .ckpt file, or NAME=FOLDER to choose what clients call "
        "it; with several a request names the one that it is for, or gets the first",
    )
    parser.add_argument(
        "--watch",
        type=ModelSource.parse,
        action=Listed,
        metavar="DIR",
        help="serve this, too, and follow it: whenever a run has a better checkpoint, or a model "
        "folder is replaced, new requests get the new model and running ones end on the old; may "
        "be given several times",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="take settings from this YAML file, as max_running: 8; variables such as "
        "ANTIPHON_SERVE_MAX_RUNNING go before it, and flags before both",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print all settings as such a file, without secrets, and exit",
    )
    add_listen_arguments(parser)
    group = parser.add_argument_group("life")
    add_switch(
        group,
        "--warmup",
        default=False,
        help="run steps as large as they come before health turns SERVING, so that the first "
        "callers do not pay for first uses (default: off)",
    )
    group.add_argument(
        "--drain-seconds",
        type=number(float, 0),
        default=30.0,
        metavar="S",
        help="what running requests get to end after SIGTERM or Ctrl-C (default: 30)",
    )
    group.add_argument(
        "--retire-seconds",
        type=number(float, 0),
        default=600.0,
        metavar="S",
        help="what running requests get to end on a model that has been replaced; until then there "
        "are two in memory, and no third is loaded (default: 600)",
    )
    group.add_argument(
        "--step-timeout",
        type=number(float, 0),
        default=300.0,
        metavar="S",
        help="what one step of the model may take; if one takes longer, requests fail, the log "
        "says where it is stuck, and the server exits with 1 (default: 300; 0: no limit)",
    )
    group = parser.add_argument_group("load")
    group.add_argument(
        "--max-running",
        type=number(int, 1, 4096),
        default=32,
        metavar="N",
        help="most requests computed together (default: 32)",
    )
    group.add_argument(
        "--max-waiting",
        type=number(int, 0, 100_000),
        default=256,
        metavar="N",
        help="most requests waiting beyond those; more get RESOURCE_EXHAUSTED (default: 256)",
    )
    group.add_argument(
        "--max-waiting-tokens",
        type=number(int, 1, 2**31),
        default=2**20,
        metavar="N",
        help="most tokens that waiting requests may have together, likewise (default: 1048576)",
    )
    group.add_argument(
        "--prefill-chunk",
        type=number(int, 1, 2**20),
        default=512,
        metavar="N",
        help="most prompt tokens of a request in one step (default: 512)",
    )
    group.add_argument(
        "--prefill-stretch",
        type=_stretch,
        default=1.7,
        metavar="X",
        help="how many times as long a step may take while it reads prompts beside texts that are "
        "being made, which wait for it: more, and prompts take less time, texts come in jerks; 0: "
        "whole chunks, as with --deterministic (default: 1.7)",
    )
    group.add_argument(
        "--kv-cache-gb",
        type=number(float, 0, 1e6),
        metavar="X",
        help="memory for the KV cache in GiB; several models share it evenly (default: what "
        "--max-running full contexts take, up to a quarter of the free memory)",
    )
    add_switch(
        group,
        "--prefix-cache",
        default=True,
        help="start prompts from what is still in the KV cache of others that began alike; takes "
        "no memory besides (default: on)",
    )
    add_watch_arguments(parser)
    group = add_machine_arguments(parser, measures=True)
    add_switch(
        group,
        "--deterministic",
        default=False,
        help="make each text the same, to the last bit, whatever else the server does meanwhile; "
        "slower, on the CPU only, and tried out at the start (default: off)",
    )
    return parser


def _stretch(text: str) -> float:
    value: float = number(float, 0, 1000)(text)
    if 0 < value <= 1:
        raise argparse.ArgumentTypeError(
            f"{text} is too little: a step takes longer with prompts than without; give more than "
            "1, or 0 for no limit"
        )
    return value


def parse(argv: list[str], prog: str) -> Settings:
    """The settings from flags, environment and file. Exits with 2 on flags that cannot be read.

    Raises:
        ConfigError: a setting from elsewhere that is unknown or out of bounds; no MODEL; settings
            that do not fit together.
    """
    return _settings(read(build_parser(prog), argv, os.environ, secrets=SECRETS))


def _settings(layered: Layered) -> Settings:
    values = {name: value for name, value in layered.values.items() if name not in NOT_SETTINGS}
    watched = [replace(source, watched=True) for source in values.pop("watch") or []]
    paths = [source.path for source in watched]
    plain = [source for source in values.pop("model") or [] if source.path not in paths]
    models: list[ModelSource] = [*plain, *watched]
    if not models:
        raise ConfigError(
            "no MODEL given: name a model folder, run folder or .ckpt file, as in antiphon serve "
            "runs/shakespeare-tiny/model"
        )
    names = [source.name for source in models if source.name]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two models are to be called {twice[0]!r}; give each a name of its own")
    return Settings(models=models, **values)
