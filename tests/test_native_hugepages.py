"""Weights move into huge pages, and nothing else about a model changes."""

from __future__ import annotations

import copy
import mmap
from pathlib import Path

import pytest
import torch
from torch import nn

from gpt.config import GPTConfig
from gpt.model import GPT
from gpt.native import hugepages
from gpt.native.hugepages import LINE_BYTES, offered, settle, take_out

needs_pages = pytest.mark.skipif(not offered(), reason="no huge pages here")


def model() -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=61, block_size=32, n_layer=2, n_head=4, d_model=64, bias=True)
    return GPT(config).eval()


@needs_pages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_in_huge_pages_is_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt = model().to(dtype)
    before, ids = copy.deepcopy(gpt), torch.randint(61, (2, 9))
    asked: list[int] = []

    class Memory(mmap.mmap):
        def madvise(self, option: int, *rest: int) -> None:
            asked.append(option)
            super().madvise(option, *rest)

    monkeypatch.setattr(hugepages.mmap, "mmap", Memory)
    assert settle(gpt)
    assert asked == [mmap.MADV_HUGEPAGE]
    assert next(gpt.parameters()).data_ptr() % hugepages.PAGE_BYTES == 0
    for p, q in zip(gpt.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.data_ptr() % LINE_BYTES == 0
        assert isinstance(p, nn.Parameter)
        assert p.requires_grad
    assert gpt.head.weight is gpt.embed.weight
    places = {p.untyped_storage().data_ptr() for p in gpt.parameters()}
    assert len(places) == 1, "side by side"
    with torch.inference_mode():
        assert torch.equal(gpt(ids), before(ids))
    gpt.load_state_dict(copy.deepcopy(before).state_dict())
    gpt(ids).sum().backward()
    assert gpt.head.weight.grad is not None


@needs_pages
def test_the_memory_lives_as_long_as_a_tensor_of_it() -> None:
    gpt = model()
    settle(gpt)
    weight, expected = gpt.head.weight.detach(), gpt.head.weight.detach().clone()
    del gpt
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("huge", [False, True])
def test_numbers_leave_the_file_that_they_were_read_from(
    tmp_path: Path, huge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hugepages, "WORTH_BYTES", 0)
    torch.save(model().state_dict(), tmp_path / "a.pt")
    state = torch.load(tmp_path / "a.pt", mmap=True, weights_only=True)
    gpt = model()
    gpt.load_state_dict(state, assign=True)
    gpt.head.weight = gpt.embed.weight
    gpt.register_buffer("more", state["head.weight"])
    places = {p.untyped_storage().data_ptr() for p in gpt.parameters()}
    take_out(gpt, huge=huge)
    assert gpt.head.weight is gpt.embed.weight
    tensors = [*gpt.parameters(), *gpt.buffers()]
    assert not places & {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert all(
        torch.equal(p, q) for p, q in zip(gpt.parameters(), model().parameters(), strict=True)
    )
    one = len({p.untyped_storage().data_ptr() for p in gpt.parameters()}) == 1
    assert one == (huge and offered())


def test_what_cannot_move_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt = model()
    places = [p.data_ptr() for p in gpt.parameters()]

    whole = torch.randn(8, 4)
    views = nn.Module()
    views.a, views.b = nn.Parameter(whole), nn.Parameter(whole[2:])
    assert not settle(views)
    gaps = nn.Module()
    gaps.a = nn.Parameter(whole[:, ::2])
    assert not settle(gaps)

    def refused(*args: object, **named: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(hugepages.mmap, "mmap", refused)
        assert not settle(gpt)
    setting = tmp_path / "enabled"
    monkeypatch.setattr(hugepages, "SETTING", setting)
    assert not offered()
    setting.write_text("always madvise [never]\n")
    assert not settle(gpt)
    setting.write_text("always [madvise] never\n")
    assert offered() == hasattr(mmap, "MADV_HUGEPAGE")
    assert [p.data_ptr() for p in gpt.parameters()] == places
