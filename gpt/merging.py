"""What byte-pair merging would leave of a piece: asked before tiktoken is, which would panic."""

from __future__ import annotations

import heapq
from collections.abc import Mapping


def leftover(piece: bytes, ranks: Mapping[bytes, int]) -> int | None:
    """Index of the first byte that merging leaves without a token, or None.

    The merges of tiktoken: of all neighbours whose union is a token, the lowest rank first, the
    leftmost of equals.
    """
    if piece in ranks:
        return None
    end = list(range(1, len(piece) + 1))  # end[i]: where the part that starts at i ends
    prev = list(range(-1, len(piece) - 1))  # prev[i]: where the part before it starts
    heap: list[tuple[int, int, int]] = []

    def offer(start: int) -> None:
        middle = end[start]
        if middle < len(piece):
            rank = ranks.get(piece[start : end[middle]])
            if rank is not None:
                heapq.heappush(heap, (rank, start, end[middle]))

    for start in range(len(piece)):
        offer(start)
    gone = bytearray(len(piece))
    while heap:
        _, start, stop = heapq.heappop(heap)
        middle = end[start]
        if gone[start] or middle >= len(piece) or end[middle] != stop:
            continue  # one of the two has been merged otherwise since
        gone[middle] = 1
        end[start] = stop
        if stop < len(piece):
            prev[stop] = start
        offer(start)
        if prev[start] >= 0:
            offer(prev[start])
    start = 0
    while start < len(piece):
        if piece[start : end[start]] not in ranks:
            return start
        start = end[start]
    return None
