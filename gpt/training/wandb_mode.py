"""Whether a run is recorded with Weights & Biases: decided from what is set up, without asking.

Imports neither wandb nor Lightning: the doctor asks it too.
"""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from typing import Literal
from urllib.parse import urlparse

Wandb = Literal["auto", "on", "off"]
Mode = Literal["online", "offline"]


def wandb_mode(wanted: Wandb) -> Mode | None:
    """How wandb will run, or None for not at all. Decided here so that it never has to ask.

    `auto` uses it if this machine is set up for it: a key, or WANDB_MODE=offline. `on` records
    offline without a key; `wandb sync` uploads that later.
    """
    environment = os.environ.get("WANDB_MODE", "").lower()
    if wanted == "off" or (wanted == "auto" and environment == "disabled"):
        return None
    if environment in ("offline", "dryrun"):
        return "offline"
    if has_wandb_key():
        return "online"
    return "offline" if wanted == "on" else None


def has_wandb_key() -> bool:
    """Whether a key is in the environment or in ~/.netrc, where `wandb login` puts it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
