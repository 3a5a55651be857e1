"""The KV cache: pages of keys and values, read and written through block tables.

Kwon et al., "PagedAttention", arXiv 2309.06180: memory is handed out in pages of a few tokens, so a
sequence holds only what it fills, and which pages it holds is a list of numbers that the host keeps
(`gpt.pages`). The cache is an argument of the forward; no module owns it.

    keys[layer]   (K, n_pages * page_size, D)      slot = page * page_size + place in the page

Short convolutions have a state beside them (`gpt.conv`), in pages of its own:

    state[layer]  (2, n_pages * m, C)              slot = page * m + place in the page, modulo m

Layers that remember the same are a group with a pool of pages of its own (`gpt.cachespec`), so a
page of a group is a page in each of its layers; which pages a layer reads is its plan's to say.

Heads come first, so that the gathered keys of a batch are one contiguous (K * b, s, D) block: the
layout in which a batched matrix product runs without another copy.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.cachespec import CacheSpec
from gpt.config import GPTConfig
from gpt.groups import Group, LayerPlan
from gpt.native import kernels as native

PAGE_SIZE = 16


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values: (K, slots, D) each; and the state of its convolutions ahead of
    attention and MLP, (2, slots, C), if it has any."""

    keys: Tensor
    values: Tensor
    page_size: int
    state: Tensor | None = None

    def write(self, k: Tensor, v: Tensor, plan: LayerPlan) -> None:
        """Store the new tokens' keys and values, (N, K, D) each, in the plan's slots."""
        assert plan.slots is not None, "a dense plan has no slots to write to"
        kernels = native.current()
        if kernels is not None and self._takes(k) and self._takes(v):
            kernels.store(k, v, self.keys, self.values, plan.slots, plan.begun, self.page_size)
            return
        if plan.begun is not None:
            # The rest of a page is read, too, and hidden; but a weight of 0 times a left-over NaN
            # would still be NaN.
            self.paged(self.keys).index_fill_(1, plan.begun, 0)
            self.paged(self.values).index_fill_(1, plan.begun, 0)
        self.keys.index_copy_(1, plan.slots, k.transpose(0, 1).to(self.keys.dtype))
        self.values.index_copy_(1, plan.slots, v.transpose(0, 1).to(self.values.dtype))

    def _takes(self, x: Tensor) -> bool:
        """Whether kernels of our own can store it."""
        return native.serves(self.keys) and x.dtype == self.keys.dtype and native.in_rows(x)

    def read(self, group: Group) -> tuple[Tensor, Tensor]:
        """Keys and values of a group, (b, K, s, D) each; what lies beyond a sequence's own length
        is left over from others and must be masked."""
        return self._read(self.keys, group), self._read(self.values, group)

    def _read(self, pool: Tensor, group: Group) -> Tensor:
        if group.first_slot is not None:
            return pool[:, group.first_slot : group.first_slot + group.s].unsqueeze(0)
        assert group.pages is not None, "a dense plan has no pages to read"
        K, _, D = pool.shape
        gathered = self.paged(pool).index_select(1, group.pages.flatten())
        keys = gathered.view(K, group.b, -1, D)  # (K, b, pages * page_size, D)
        return keys[:, :, group.skip : group.skip + group.s].transpose(0, 1)

    def paged(self, pool: Tensor) -> Tensor:
        """(K, n_pages, page_size * D), a view."""
        return pool.view(pool.shape[0], -1, self.page_size * pool.shape[2])


class KVCache:
    """Keys and values of all layers, for as many sequences as the pages hold.

    Args:
        n_pages: pages of each group of layers, the null page (0) included; a number is that of
            every group.
        page_size: tokens a page holds.

    Attributes:
        spec: what the layers keep, and in which groups.
    """

    def __init__(
        self,
        config: GPTConfig,
        n_pages: int | Seq[int],
        page_size: int = PAGE_SIZE,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec = CacheSpec.of(config)
        self.page_size = page_size
        groups = len(self.spec.groups)
        self.n_pages = [n_pages] * groups if isinstance(n_pages, int) else list(n_pages)
        if len(self.n_pages) != groups:
            raise ValueError(f"{len(self.n_pages)} pools for {groups} groups of layers")

        def pool(layer: int) -> Tensor:
            slots = self.n_pages[self.spec.group_of(layer)] * page_size
            # Zeros, not empty: the null page is read as padding, and nobody writes to it.
            return torch.zeros(
                config.kv_heads, slots, config.head_width, dtype=dtype, device=device
            )

        def state() -> Tensor | None:
            if not self.spec.conv_width:
                return None
            slots = self.n_pages[-1] * self.spec.groups[-1].page_tokens(page_size)
            return torch.zeros(2, slots, config.d_model, dtype=dtype, device=device)

        self._layers = [
            LayerCache(pool(layer), pool(layer), page_size, state())
            for layer in range(config.n_layer)
        ]

    def layer(self, index: int) -> LayerCache:
        return self._layers[index]

    @property
    def read_in_place(self) -> bool:
        """Whether single tokens read their keys where they lie, so that sequences of all lengths
        may go together: nothing is padded (`gpt.native`)."""
        return native.serves(self._layers[0].keys)

    def paged(self, group: int) -> list[Tensor]:
        """All that a group holds, page by page: views (K or 2, n_pages, numbers)."""
        spec = self.spec.groups[group]
        found: list[Tensor] = []
        for layer in spec.layers:
            held = self._layers[layer]
            pools = (held.state,) if spec.conv_width else (held.keys, held.values)
            found += [
                pool.view(len(pool), self.n_pages[group], -1) for pool in pools if pool is not None
            ]
        return found

    @torch.inference_mode()
    def broken(self, pages: Seq[Seq[int]]) -> list[set[int]]:
        """Which of the pages of each group hold, in any layer, a number that is not finite."""
        found: list[set[int]] = []
        for group, wanted in enumerate(pages):
            held = self.paged(group)
            index = torch.tensor(wanted, dtype=torch.long, device=held[0].device)
            # What is not finite stays so in any sum.
            sums = torch.stack([pool.index_select(1, index).sum((0, 2)) for pool in held])
            fine = sums.isfinite().all(0).tolist() if wanted else []
            found.append({page for page, good in zip(wanted, fine, strict=True) if not good})
        return found

    @staticmethod
    def page_bytes(
        config: GPTConfig, page_size: int = PAGE_SIZE, dtype: torch.dtype = torch.float32
    ) -> list[int]:
        """Bytes that one page of each group takes, over all layers of the group."""
        return CacheSpec.of(config).page_bytes(page_size, dtype.itemsize)
