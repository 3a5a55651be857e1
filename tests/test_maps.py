"""Attention maps: the weights with which a model itself mixes; and how they are shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpt import show
from gpt.checkpoint import load_model
from gpt.config import GPTConfig
from gpt.errors import ConfigError, PromptError
from gpt.maps import see_maps
from gpt.model import GPT
from gpt.show_maps import drawing, labels, mosaic, smaller
from gpt.tokenizer import Tokenizer

T = 40


def model(**changes: object) -> GPT:
    torch.manual_seed(0)
    values = {"n_layer": 2, "n_head": 4, "d_model": 32, "block_size": 1024, **changes}
    return GPT(GPTConfig(vocab_size=50, **values)).double().eval()  # type: ignore[arg-type]


def maps_of(gpt: GPT, ids: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    see_maps(gpt, ids, lambda layer, each: found.append(each))
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_head": 2, "qk_norm": True},
        {"position": "alibi"},
        {"position": "relative"},
        {"pattern": "window:5+sinks:2"},
        {"pattern": "dilated:3:4"},
        {"pattern": ["window:4", "causal"]},
    ],
)
def test_the_maps_mix_values_as_the_model_does(changes: dict[str, object]) -> None:
    """What the model's attention hands to its output is the values under the map."""
    gpt = model(**changes)
    ids = torch.randint(0, 50, (T,))
    seen: list[tuple[Tensor, Tensor]] = []
    for block in gpt.blocks:
        attn = block.attn

        def keep(_: object, given: tuple[Tensor], named: dict[str, object], attn=attn) -> None:
            x, rotary = (*given, *named.values())[:2]
            seen.append((attn.project(x, rotary)[2][0], torch.empty(0)))

        attn.register_forward_pre_hook(keep, with_kwargs=True)
        attn.out.register_forward_pre_hook(
            lambda _, given: seen.__setitem__(-1, (seen[-1][0], given[0][0]))
        )
    with torch.no_grad():
        maps = maps_of(gpt, ids)
    for found, (v, mixed) in zip(maps, seen, strict=True):
        H = len(found)
        values = v.repeat_interleave(H // v.shape[1], 1).transpose(0, 1)  # (H, T, D)
        expected = (found.double() @ values).transpose(0, 1).flatten(1)
        torch.testing.assert_close(expected, mixed, rtol=1e-4, atol=1e-6)
        assert (found.triu(1) == 0).all()
        torch.testing.assert_close(found.sum(-1), torch.ones(H, T))


def test_long_texts_in_block_rows_have_maps_too() -> None:
    """The plan runs these without a mask; where a window is dilated, class by class."""
    for pattern in ("window:16", "dilated:16:4"):
        gpt = model(pattern=pattern, n_layer=1)
        found = maps_of(gpt, torch.randint(0, 50, (600,)))[0]
        at = torch.arange(600)
        seen = gpt.pattern.kinds[0].allowed(at[:, None], at)
        assert ((found > 0) == seen).all()


def test_looking_changes_nothing() -> None:
    gpt = model()
    ids = torch.randint(0, 50, (T,))
    before = gpt(ids[None])
    layers: list[int] = []
    see_maps(gpt, ids, lambda layer, _: layers.append(layer), layers=[1])
    assert layers == [1]
    assert torch.equal(gpt(ids[None]), before)
    assert not any(block.attn._forward_pre_hooks for block in gpt.blocks)


def test_small_and_large_pictures() -> None:
    found = torch.eye(100)[None]
    cells = smaller(found, 40)
    assert cells.shape == (1, 34, 34)
    assert torch.equal(cells[0], torch.eye(34))
    lines = drawing(torch.eye(3), ["a", "文", "a token that is long"], " .:*#")
    assert lines == [f"{'a':14} ##", f"文{'':12}   ##", "a token that …     ##"]
    assert len(drawing(torch.eye(100), ["x"] * 100, " .:*#")) == 34
    picture = mosaic([torch.eye(2).expand(3, 2, 2)] * 2)
    assert picture.shape == (2 * 66, 3 * 66)
    assert picture[1, 1] == 0  # the first token looks at itself
    assert picture[1, 60] == pytest.approx(show.FUTURE)


def test_tokens_have_labels() -> None:
    tokenizer = Tokenizer.bytes(["<|im_end|>"])
    ids = [*tokenizer.encode("a\n"), tokenizer.special["<|im_end|>"], tokenizer.eot]
    assert labels(ids, tokenizer) == ["a", "⏎", "<|im_end|>", tokenizer.end_of_text]


def test_the_command(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from matplotlib.image import imread

    config = load_model(model_folder).model.config
    words = ["maps", str(model_folder), "--prompt"]
    picture = tmp_path / "maps.png"
    assert show.main([*words, "To be, or not", "--png", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line[:5].strip().isdigit()]) == config.n_layer
    side = 2 + 64 // 13 * 13
    assert imread(picture).shape[:2] == (config.n_layer * side, config.n_head * side)

    assert show.main([*words, "To be", "--layer", "0", "--head", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("layer 0, head 1: ")
    assert [line.split()[0] for line in lines[1:]] == ["T", "o", "·", "b", "e"]

    monkeypatch.setattr("sys.stdin", io.StringIO("abc"))
    assert show.main([*words, "-", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["tokens"] == ["a", "b", "c"]
    assert len(record["maps"]) == config.n_layer * config.n_head
    assert all(sum(row) == pytest.approx(1) for row in record["maps"][-1]["weights"])


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (["a", "--head", "0"], ConfigError, "give the layer, too"),
        (["a", "--layer", "99"], ConfigError, r"--layer is 99, but the model has 0 to"),
        (["a", "--layer", "0", "--head", "-1"], ConfigError, "--head is -1"),
        (["", "--layer", "0"], PromptError, "has 0 tokens, but maps are shown for 1 to 64"),
        (["a" * 65], PromptError, "has 65 tokens"),
    ],
)
def test_mistakes_are_named(
    model_folder: Path, words: list[str], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        show.main(["maps", str(model_folder), "--prompt", *words])
