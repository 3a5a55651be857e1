"""What an imported vocabulary asks for is done wherever text becomes ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.checkpoint import load_model, save_model
from gpt.config import GPTConfig
from gpt.data.prepare import prepare
from gpt.data.shards import PreparedData
from gpt.errors import TokenizerError
from gpt.evaluate import evaluate
from gpt.generate import generate
from gpt.model import GPT
from gpt.params import SamplingParams
from gpt.rules import Rules, composed
from gpt.sample import main as sample
from gpt.score import score
from gpt.splitting import SEGMENT, Splitter
from gpt.stream import FinishReason, TextStream
from gpt.tokenizer import Tokenizer
from gpt.vocab.described import WORDS

BYTES = [bytes([byte]) for byte in range(256)]
SPECIAL = {"<s>": 256, "</s>": 257, "<|end|>": 258}
OURS = Tokenizer(
    "bpe", r"(?s:.)", BYTES, special=SPECIAL, end_of_text="</s>", begin="<s>", ends=["<|end|>"]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "m"
    config = GPTConfig(vocab_size=259, block_size=32, n_layer=1, n_head=2, d_model=16)
    gpt = GPT(config)
    with torch.no_grad():
        for weight in gpt.parameters():
            weight.mul_(8)  # so that what stands before a token matters to it
    save_model(folder, gpt, OURS)
    return folder


def made(folder: Path, prompt: str | list[int]) -> list[int]:
    loaded = load_model(folder)
    params = SamplingParams(max_tokens=6, temperature=1, seed=0)
    return [piece.token for piece in generate(loaded.model, loaded.tokenizer, prompt, params)]


def test_texts_begin_with_the_vocabularys_own_token(model: Path) -> None:
    assert made(model, "ab") == made(model, [256, *b"ab"]) != made(model, [*b"ab"])
    assert made(model, "") == made(model, []) == made(model, [256]) != made(model, [257])


def test_a_text_is_scored_from_its_beginning(model: Path) -> None:
    loaded = load_model(model)
    found = score(loaded.model, loaded.tokenizer, "hello")
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([[256, *b"hell"]]))[0]
    wanted = logits.log_softmax(-1)[torch.arange(5), torch.tensor([*b"hello"])]
    torch.testing.assert_close(torch.tensor([m.logprob for m in found]), wanted)


def test_held_out_text_is_evaluated_from_its_beginning(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("hello there")
    loaded = load_model(model)
    data = prepare([str(text)], tokenizer=loaded.tokenizer, root=tmp_path / "data")
    assert isinstance(data, PreparedData)
    found = evaluate(loaded, data, split="train", progress=False)
    ids = data.train[0 : len(data.train)].tolist()
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([[256, *ids[:-1]]]))[0]
    nats = torch.nn.functional.cross_entropy(logits, torch.tensor(ids), reduction="sum")
    assert found.nats == pytest.approx(float(nats), rel=1e-5)


@pytest.mark.parametrize("end", [257, 258])
def test_a_text_ends_with_any_token_that_ends_one(end: int) -> None:
    stream = TextStream(OURS)
    assert stream.push(ord("a"), last=False) == "a"
    assert stream.push(end, last=False) == ""
    assert stream.finish_reason is FinishReason.END_OF_TEXT


def test_special_tokens_of_a_prompt_are_taken_on_request(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(model), "--json", "--temperature", "0", "--max-tokens", "4", "--prompt"]
    sizes = []
    for more in ([], ["--special"]):
        assert sample([*flags, "a<|end|>b", *more]) == 0
        out = capsys.readouterr().out
        sizes.append(int(out.split('"prompt_tokens": ')[1].split(",")[0]))
    assert sizes == [10, 4]
    with pytest.raises(SystemExit):
        sample([str(model), "--special"])


def test_a_prefix_is_put_before_a_document_once(tmp_path: Path) -> None:
    """However long it is: segments of one document are no beginnings."""
    ours = Tokenizer(
        "bpe", WORDS[0], BYTES, special=SPECIAL, end_of_text="</s>", rules=Rules(prefix="each")
    )
    text = "some words, and more. " * (SEGMENT // 16)
    path = tmp_path / "text.txt"
    path.write_text(text)
    data = prepare([str(path)], tokenizer=ours, root=tmp_path / "data")
    ids = data.train[0 : len(data.train)].tolist()
    assert len(ids) > SEGMENT
    assert ids == [*b" ", *text.encode()[: len(ids) - 2], 257]
    assert ours.encode("a</s>b", special=["</s>"]) == [*b" a", 257, *b" b"]
    assert ours.encode("more", after="text") == [*b"more"]


def test_a_pattern_that_joins_words_and_signs_is_cut_at_blanks_alone() -> None:
    text = "a," * 9 + " " + "b.c" * SEGMENT
    first = next(iter(Splitter(WORDS[1]).segments([text[: SEGMENT + 100]])))
    assert first == "a," * 9


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(
        st.sampled_from("aeE \u0301\u0327\u0338>=\u1112\u1161\u11ab가\u0f71\u0f72漢\u09c7\u09be")
    ),
    size=st.integers(1, 5),
)
def test_composition_does_not_depend_on_chunks(text: str, size: int) -> None:
    import unicodedata

    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    assert "".join(composed(chunks)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize(
    "changes",
    [
        {"begin": "<x>"},
        {"begin": 3},
        {"ends": "</s>"},
        {"ends": ["<x>"]},
        {"always": ["<x>"]},
        {"always": 3},
        {"order": [0, 0]},
        {"order": [400]},
        {"order": [-1]},
        {"order": ["a"]},
        {"order": {}},
        {"characters": 1},
        {"characters": True, "order": [1, 2]},
        {"normalizer": "NFKC"},
        {"prefix": 1},
        {"prefix": "x"},
        {"begin": None},
        {"ends": []},
    ],
)
def test_a_damaged_file_of_format_3_is_refused(changes: dict[str, object]) -> None:
    values = OURS.to_dict()
    assert values["format"] == 3
    assert Tokenizer.from_dict(values).to_dict() == values
    with pytest.raises(TokenizerError):
        Tokenizer.from_dict(values | changes)


def test_plain_tokenizers_are_written_as_before() -> None:
    plain = Tokenizer("bpe", r"(?s:.)", BYTES, special=SPECIAL, end_of_text="</s>")
    assert plain.to_dict()["format"] == 2
    assert not {"begin", "order"} & plain.to_dict().keys()
    assert plain.fingerprint != OURS.fingerprint
    assert plain.start == plain.eot == 257
