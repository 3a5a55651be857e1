"""`antiphon eval`: the trainer's own number, from a model folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpt.checkpoint import LoadedModel, load_model, save_model
from gpt.errors import CheckpointError, ConfigError, DataError, TokenizerError
from gpt.evaluate import evaluate, main
from gpt.evaluation import IGNORE, Evaluation, Tally
from tests.training.small import fit, make_data, make_trainer

TEXTS = [f"Größe {i}: the king → café, and war {i * i}\n" for i in range(30)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model folder, and the module it was made from with what the trainer's test says of it."""
    base = tmp_path_factory.mktemp("evaluated")
    corpus = base / "texts"
    corpus.mkdir()
    for i, text in enumerate(TEXTS):
        (corpus / f"{i:02}.txt").write_text(text)
    module = fit(base, corpus, 3, data=make_data(corpus, eval_batch_size=32))
    make_trainer(base, 3).test(module, datamodule=module.data, verbose=False)
    training = {"data": module.data.record()}
    save_model(base / "model", module.gpt, module.tokenizer, training=training)
    return base / "model", module


def told(model: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([str(model), "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_it_agrees_with_the_trainers_test_to_the_last_bit(trained, capsys) -> None:
    model, module = trained
    found = told(model, capsys)
    assert found["nats"] == module.evaluation.nats
    assert found["targets"] == module.evaluation.targets == len(module.data.prepared.val)
    assert found["bits_per_byte"] == module.evaluation.bits_per_byte
    assert found["bits_per_char"] == module.evaluation.bits_per_char
    assert main([str(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"loss           {module.evaluation.loss:.6f} nats per token" in lines
    assert any(line.startswith("bits per char  ") for line in lines)


def test_the_text_may_be_named_as_for_training_or_by_its_prepared_folder(
    trained, capsys, tmp_path
) -> None:
    model, module = trained
    source = str(module.data.sources[0].source)
    again = told(model, capsys, "--data", source, "--root", str(tmp_path))
    prepared = told(model, capsys, "--data", str(module.data.prepared.folder))
    assert again["nats"] == prepared["nats"] == module.evaluation.nats
    assert main([str(model), "--data", source, "--root", str(tmp_path)]) == 0
    assert "--split all reads all of it" in capsys.readouterr().err


def test_the_parts_of_a_text_are_told_apart(trained, capsys) -> None:
    model, module = trained
    val, train, whole = (told(model, capsys, "--split", s) for s in ("val", "train", "all"))
    prepared = module.data.prepared
    assert whole["targets"] == val["targets"] + train["targets"]
    assert whole["targets"] == len(prepared.val) + len(prepared.train)
    assert whole["text_chars"] == sum(map(len, TEXTS))
    assert whole["text_bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert whole["nats"] == pytest.approx(val["nats"] + train["nats"], rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_the_batch_size_does_not_change_the_result(trained, capsys, batch_size) -> None:
    model, module = trained
    found = told(model, capsys, "--batch-size", str(batch_size))
    assert found["nats"] == pytest.approx(module.evaluation.nats, rel=1e-6)
    assert found["targets"] == module.evaluation.targets


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_a_stride_gives_every_token_more_to_look_back_on(trained, stride, tmp_path) -> None:
    model, module = trained
    loaded = load_model(model)
    T, eot = loaded.model.config.block_size, loaded.tokenizer.eot
    stream = [eot, *module.data.prepared.val[0 : len(module.data.prepared.val)].tolist()]
    wanted, counted = 0.0, 0
    for start in range(0, len(stream) - 1, stride):
        ids = torch.tensor([stream[start : start + T + 1]])
        with torch.no_grad():
            nats = F.cross_entropy(loaded.model(ids[:, :-1])[0], ids[0, 1:], reduction="none")
        new = nats if start == 0 else nats[max(0, counted - start) :]
        wanted += float(new.double().sum())
        counted += len(new)
        if start + T >= len(stream) - 1:
            break
    assert counted == len(stream) - 1
    found = evaluate(loaded, module.data.prepared, stride=stride, progress=False)
    assert found.targets == counted
    assert found.nats == pytest.approx(wanted, rel=1e-6)


def test_document_borders_are_those_of_the_training(trained, capsys, tmp_path) -> None:
    model, module = trained
    loaded = load_model(model)
    borders = {"data": {**module.data.record(), "document_borders": True}}
    save_model(tmp_path / "apart", loaded.model, loaded.tokenizer, training=borders)
    joined, apart = told(model, capsys), told(tmp_path / "apart", capsys)
    assert not joined["document_borders"]
    assert apart["document_borders"]
    assert apart["nats"] != joined["nats"]
    assert told(model, capsys, "--document-borders")["nats"] == apart["nats"]


def test_what_cannot_be_measured_is_refused(trained, tmp_path) -> None:
    model, _ = trained
    loaded: LoadedModel = load_model(model)
    with pytest.raises(ConfigError, match="--stride is 17, but must be 1 to the model's context"):
        main([str(model), "--stride", "17"])
    with pytest.raises(DataError, match="nowhere"):
        main([str(model), "--data", str(tmp_path / "nowhere.txt")])
    with pytest.raises(SystemExit):
        main([str(model), "--batch-size", "0"])
    save_model(tmp_path / "silent", loaded.model, loaded.tokenizer)
    with pytest.raises(CheckpointError, match=r"does not say what text.*--data"):
        main([str(tmp_path / "silent")])
    damaged = {"data": {"sources": 7}}
    save_model(tmp_path / "damaged", loaded.model, loaded.tokenizer, training=damaged)
    with pytest.raises(CheckpointError, match="damaged record"):
        main([str(tmp_path / "damaged")])
    (tmp_path / "other.txt").write_text("some words of another text " * 20)
    other = make_data(tmp_path / "other.txt", tokenizer="chars")
    other.prepare_data()
    other.setup("fit")
    with pytest.raises(TokenizerError, match=r"is prepared with .*chars.*the model has .*bytes"):
        main([str(model), "--data", str(other.prepared.folder)])


# --- The sums -------------------------------------------------------------------------------------


def test_sums_have_no_order() -> None:
    """Shares of any number of processes add up to the same bits."""
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(12, 7, 30, generator=generator)
    targets = torch.randint(0, 30, (12, 7), generator=generator)
    targets[3, 2:] = IGNORE

    def tally(batches: list[range]) -> torch.Tensor:
        found = Tally()
        for batch in batches:
            rows = list(batch)
            found.add(
                F.cross_entropy(logits[rows].transpose(1, 2), targets[rows], reduction="none"),
                targets[rows],
            )
        return found.state()

    whole = tally([range(12)])
    assert torch.equal(tally([range(5, 12), range(5)]), whole)
    shares = [tally([range(i, 12, 3)]) for i in range(3)]
    assert torch.equal(torch.stack(shares).sum(0), whole)
    merged = Tally()
    merged.load(whole)
    exact = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="sum")
    assert merged.nats == pytest.approx(float(exact), rel=1e-6)
    assert merged.targets == 12 * 7 - 5


def test_what_is_no_number_stays_none() -> None:
    tally = Tally()
    tally.add(torch.full((1, 2), math.nan), torch.zeros(1, 2, dtype=torch.int64))
    tally.add(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int64))
    assert math.isnan(tally.nats)
    merged = Tally()
    merged.load(tally.state() + Tally().state())
    assert math.isnan(merged.nats)


def test_bits_per_character_count_characters() -> None:
    found = Evaluation(nats=math.log(2) * 60, targets=5, text_bytes=30, text_chars=20)
    assert found.bits_per_byte == pytest.approx(2.0)
    assert found.bits_per_char == pytest.approx(3.0)
    assert Evaluation(1.0, 1, None).bits_per_char is None
