"""The server of the soak: the real one, with a model whose texts follow from what is in the cache.

It keeps the ids themselves as keys and values, reads them back through the plan as attention does,
and continues with what `soak_client.following` says of them. A page that is another's, or that was
given away too early, so gives another text. MODEL is a folder, in which `state.json` is kept.
"""

from __future__ import annotations

import sys
import time
import weakref

import numpy as np
import torch
from torch import Tensor

from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.plan import AttentionPlan
from gpt.tokenizer import Tokenizer
from serve.engine import Engine
from serve.folders import ModelSource
from serve.life import run
from serve.server import Settings, parse, start_log
from tests.integration.soak_client import BLOCK_SIZE, END, following
from tests.integration.state import keep_state

PAGE_SIZE, PAGES = 4, 160
"""So few that those who run crowd each other out."""


ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


class RememberingModel:
    """Continues the ids that it finds in the cache.

    Args:
        shift: as in `following`.

    Attributes:
        pause: seconds that each forward takes besides.
    """

    def __init__(self, shift: int = 0) -> None:
        self._shift = shift
        self.pause = 0.0
        self.config = GPTConfig(
            vocab_size=END + 1, block_size=BLOCK_SIZE, n_layer=1, n_head=1, d_model=2
        )

    def num_params(self) -> int:
        return 0

    def __call__(self, ids: Tensor, plan: AttentionPlan, cache: KVCache) -> Tensor:
        time.sleep(self.pause)
        layer, store = plan.layer(0), cache.layer(0)
        pairs = torch.stack([ids, plan.positions], -1).to(store.keys.dtype)[:, None]  # (N, 1, 2)
        store.write(pairs, pairs, layer)
        assert plan.logit_rows is not None
        wanted = {row: i for i, row in enumerate(plan.logit_rows.tolist())}
        logits = torch.full((len(wanted), END + 1), -1e9)  # (M, V)
        for group in layer.groups:
            found = store.read(group)[1][:, 0].numpy().astype(np.int64)  # (b, s, 2)
            q_pos = group.q_pos.expand(group.b, -1).flatten().tolist()
            k_pos = group.k_pos.expand(group.b, -1).numpy()
            rows = range(len(q_pos)) if group.rows is None else group.rows.tolist()
            for i, (row, last) in enumerate(zip(rows, q_pos, strict=True)):
                if row in wanted:
                    member = i // group.t
                    before = found[member][k_pos[member] <= last]
                    whole = np.array_equal(before[:, 1], np.arange(last + 1))
                    token = following(before[:, 0].tolist(), self._shift) if whole else ord("?")
                    logits[wanted[row], token] = 0
        return logits


def load(settings: Settings, source: ModelSource, replaces: Engine | None) -> Engine:
    engine = remembering(settings)
    ENGINES.add(engine)
    keep_state(ENGINES, source.path)
    return engine


def remembering(settings: Settings, shift: int = 0) -> Engine:
    return Engine(
        RememberingModel(shift),
        Tokenizer.bytes(),
        name="soak",
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        max_waiting_tokens=settings.max_waiting_tokens,
        n_pages=PAGES,
        page_size=PAGE_SIZE,
        prefill_chunk=16,
        check_every_step=True,
    )


if __name__ == "__main__":
    settings = parse(sys.argv[1:], "antiphon serve")
    start_log(settings)
    sys.exit(run(settings, load))
