"""The KV cache: pages of keys and values, read and written through block tables.

Kwon et al., "PagedAttention", arXiv 2309.06180: memory is handed out in pages of a few tokens, so a
sequence holds only what it fills, and which pages it holds is a list of numbers that the host keeps
(`gpt.pages`). The cache is an argument of the forward; no module owns it.

    keys[layer]   (K, n_pages * page_size, D)      slot = page * page_size + place in the page

Heads come first, so that the gathered keys of a batch are one contiguous (K * b, s, D) block: the
layout in which a batched matrix product runs without another copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.plan import Group, LayerPlan

PAGE_SIZE = 16


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values: (K, slots, D) each."""

    keys: Tensor
    values: Tensor
    page_size: int

    def write(self, k: Tensor, v: Tensor, plan: LayerPlan) -> None:
        """Store the new tokens' keys and values, (N, K, D) each, in the plan's slots."""
        assert plan.slots is not None, "a dense plan has no slots to write to"
        self.keys.index_copy_(1, plan.slots, k.transpose(0, 1).to(self.keys.dtype))
        self.values.index_copy_(1, plan.slots, v.transpose(0, 1).to(self.values.dtype))

    def read(self, group: Group) -> tuple[Tensor, Tensor]:
        """Keys and values of a group, (b, K, s, D) each; what lies beyond a sequence's own length
        is left over from others and must be masked."""
        return self._read(self.keys, group), self._read(self.values, group)

    def _read(self, pool: Tensor, group: Group) -> Tensor:
        K, _, D = pool.shape
        if group.first_slot is not None:
            return pool[:, group.first_slot : group.first_slot + group.s].unsqueeze(0)
        assert group.pages is not None, "a dense plan has no pages to read"
        paged = pool.view(K, -1, self.page_size * D)
        gathered = paged.index_select(1, group.pages.flatten())  # (K, b * pages, page_size * D)
        return gathered.view(K, group.b, -1, D)[:, :, : group.s].transpose(0, 1)


class KVCache:
    """Keys and values of all layers, for as many sequences as the pages hold.

    Every layer of today's patterns keeps every position, so one block table a sequence serves all
    layers. A layer that keeps less (a window) or something else (a state) becomes a second group of
    layers with a block table of its own: the table is the plan's, the plan picks it per group.

    Args:
        n_pages: pages in all, the null page (0) included.
        page_size: tokens a page holds.
    """

    def __init__(
        self,
        config: GPTConfig,
        n_pages: int,
        page_size: int = PAGE_SIZE,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.n_pages = n_pages
        self.page_size = page_size
        shape = (config.kv_heads, n_pages * page_size, config.head_width)
        # Zeros, not empty: a masked weight of 0 times a left-over NaN would still be NaN.
        self._layers = [
            LayerCache(
                torch.zeros(shape, dtype=dtype, device=device),
                torch.zeros(shape, dtype=dtype, device=device),
                page_size,
            )
            for _ in range(config.n_layer)
        ]

    def layer(self, index: int) -> LayerCache:
        return self._layers[index]

    def scrub(self, pages: list[int]) -> None:
        """Zero pages that hold NaN or infinity, before somebody else's padding reads them."""
        for layer in self._layers:
            for page in pages:
                start = page * self.page_size
                layer.keys[:, start : start + self.page_size] = 0
                layer.values[:, start : start + self.page_size] = 0

    @staticmethod
    def page_bytes(
        config: GPTConfig, page_size: int = PAGE_SIZE, dtype: torch.dtype = torch.float32
    ) -> int:
        """Bytes that one page takes over all layers."""
        per_token = 2 * config.n_layer * config.kv_heads * config.head_width * dtype.itemsize
        return per_token * page_size
