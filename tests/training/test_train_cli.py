"""The command line inside this process: what is parsed, and what is refused."""

from __future__ import annotations

import pytest
import yaml

from gpt.training.cli import check_precision, main
from gpt.training.run import shipped_configs


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")


def parsed(capsys, *arguments):
    """The configuration as `fit` would run it."""
    with pytest.raises(SystemExit) as done:
        main(["fit", *arguments, "--print_config"])
    assert done.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path, corpus, capsys):
    (tmp_path / "mine.yaml").write_text(
        "model:\n  preset: gpt2-124m\n  config: {n_layer: 1, d_model: 16, n_head: 2}\n"
        "trainer: {max_steps: 1, accelerator: cpu}\nsamples: {every_n_steps: null}\n"
    )
    status = main(
        ["fit", "--config", "mine.yaml", "--model.config.d_model", "8", "--data.source",
         str(corpus), "--data.tokenizer", "bytes", "--data.batch_size", "1",
         "--model.config.block_size=32", "--model.config.vocab_size=0"]
    )  # fmt: skip
    assert status == 0, capsys.readouterr().err
    config = yaml.safe_load((tmp_path / "runs" / "mine" / "config.yaml").read_text())
    got = config["model"]["config"]
    assert (got["d_model"], got["block_size"], got["vocab_size"]) == (8, 32, 0)  # flags
    assert (got["n_layer"], got["n_head"]) == (1, 2)  # file
    assert (got["position"], got["norm"], got["bias"]) == ("learned", "layernorm", True)  # preset
    assert got["mlp"] == "gelu"
    assert got["dropout"] == 0.0  # default
    assert config["name"] == "mine"  # after the file


@pytest.mark.parametrize("name", shipped_configs())
def test_every_shipped_config_is_accepted(name, capsys):
    config = parsed(capsys, "--config", name)
    assert config["name"] == name
    assert config["trainer"]["max_steps"] > 0


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["fit", "--model.preset", "gpt2-124"], 1, "did you mean gpt2-124m"),
        (["fit", "--model.config.n_layer", "0"], 1, "n_layer is 0"),
        (["fit", "--model.config.n_layer", "two"], 2, "model.config.n_layer"),
        (["fit", "--model.config.n_layr", "2"], 2, "--model.config.n_layr"),
        (["fit", "--config", "typo.yaml"], 2, "model.config.n_layr"),
        (["fit", "--config", "broken.yaml"], 2, "broken.yaml"),
        (["fit", "--config", "nowhere"], 1, "no config 'nowhere'"),
        (["fit", "--config=nowhere"], 1, "no config 'nowhere'"),
        (["fit", "--wandb", "perhaps"], 2, "wandb"),
        (["fit", "--name", "a/b"], 1, "the run's name"),
        (["fit", "--model.optimizer.lr", "0"], 1, "optimizer.lr is 0"),
        (["fit", "--data.batch_size", "0"], 1, "data.batch_size is 0"),
        (["fit", "--seed_everything", "-1"], 1, "seed_everything is -1"),
        (["fit", "--trainer.max_epochs", "2"], 1, "trainer.max_steps"),
        (["fit", "--trainer.val_check_interval", "0.5"], 1, "whole number of batches"),
        (["fit", "--trainer.overfit_batches", "1"], 1, "overfit_batches"),
        (["fit", "--ckpt_path", "last"], 1, "no checkpoint at"),
        (["test"], 1, "train first"),
        (["predict"], 2, "'fit', 'validate', 'test'"),
        ([], 2, "fit,validate,test"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(tmp_path, capsys, arguments, status, told):
    (tmp_path / "typo.yaml").write_text("model: {config: {n_layr: 2}}\n")
    (tmp_path / "broken.yaml").write_text("model: [\n")
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("train.py: error: ")
    assert told in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", 16, "16"])
def test_fp16_on_a_cpu_is_refused(precision):
    with pytest.raises(Exception, match=f"precision is {precision}.*bf16-mixed"):
        check_precision(precision, "cpu")
    check_precision(precision, "cuda")
    check_precision("bf16-mixed", "cpu")


@pytest.mark.parametrize(
    ("text", "told"),
    [("a few words", "tokens, but one block needs 256"), ("", "empty"), (None, "neither a file")],
)
def test_text_that_cannot_be_trained_on_is_one_line(tmp_path, capsys, text, told):
    if text is not None:
        (tmp_path / "text.txt").write_text(text)
    arguments = ["--data.source", "text.txt", "--data.tokenizer", "bytes"]
    status = main(["fit", *arguments, "--trainer.max_steps", "2", "--trainer.accelerator", "cpu"])
    line = capsys.readouterr().err.replace("\r", "\n").splitlines()[-1].strip()
    assert status == 1
    assert line.startswith("train.py: error: ")
    assert told in line
