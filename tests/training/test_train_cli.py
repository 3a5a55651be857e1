"""The command line inside this process: what is parsed, and what is refused."""

from __future__ import annotations

import csv
import json
import resource
import shutil

import pytest
import yaml

from gpt.training.checks import check_precision
from gpt.training.cli import main
from gpt.training.run import find_config, shipped_configs
from tests.training.small import write_corpus


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


def test_a_preset_among_the_flags_wins_over_the_file_and_loses_to_other_flags(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(
        "model:\n  config: {n_layer: 9, d_model: 96, d_ff: 100, dropout: 0.5, block_size: 8}\n"
        "trainer: {max_steps: 1}\n"
    )
    got = parsed(capsys, "--model.config.block_size=32", "--model.preset", "nano",
                 "--config=mine.yaml", "--model.config.n_head", "4")  # fmt: skip
    assert got["model"]["preset"] == "nano"
    config = got["model"]["config"]
    assert (config["n_layer"], config["d_model"], config["d_ff"]) == (2, 64, None)  # preset
    assert (config["n_head"], config["block_size"]) == (4, 32)  # flags, also before the file
    assert config["dropout"] == 0.5  # file: no preset names it
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(got))
    assert parsed(capsys, "--config", "again.yaml")["model"] == got["model"]


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ("window:64+sinks:2", "window:64+sinks:2"),
        ("[window:64, window:64, causal]", ["window:64", "window:64", "causal"]),
    ],
)
def test_a_pattern_is_text_or_a_list_in_flags_and_files(given, pattern, tmp_path, capsys):
    flags = parsed(capsys, "--model.config.pattern", given)
    assert flags["model"]["config"]["pattern"] == pattern
    (tmp_path / "mine.yaml").write_text(f"model: {{config: {{pattern: {given}}}}}\n")
    assert parsed(capsys, "--config", "mine.yaml")["model"]["config"]["pattern"] == pattern


def test_the_users_own_pattern_is_trained_with(tmp_path, corpus, capsys, monkeypatch):
    """A class that nobody has imported: the settings of a training run are the user's own."""
    (tmp_path / "pattern_of_mine.py").write_text(
        "from dataclasses import dataclass\nfrom gpt.patterns import Pattern\n"
        "@dataclass(frozen=True)\nclass Every(Pattern):\n    n: int\n"
        "    def allowed(self, q, k):\n        return (k <= q) & ((q - k) % self.n == 0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    status = main(
        ["fit", "--model.preset", "nano", "--model.config.pattern",
         "[pattern_of_mine:Every(n=3), causal]", "--model.config.block_size", "32",
         "--data.source", str(corpus), "--data.tokenizer", "bytes", "--trainer.max_steps", "1",
         "--trainer.accelerator", "cpu", "--samples.every_n_steps", "null", "--name", "mine"]
    )  # fmt: skip
    assert status == 0, capsys.readouterr().err
    saved = json.loads((tmp_path / "runs" / "mine" / "model" / "config.json").read_text())
    assert saved["model"]["pattern"] == ["pattern_of_mine:Every(n=3)", "causal"]


@pytest.mark.parametrize("name", shipped_configs())
def test_every_shipped_config_is_accepted(name, capsys):
    config = parsed(capsys, "--config", name)
    assert config["name"] == name
    assert config["trainer"]["max_steps"] > 0


RECIPES = (
    "shakespeare-tiny", "shakespeare-fast", "tinyshakespeare-char", "tinyshakespeare-fast",
    "tinyshakespeare-long",
)  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains_a_few_steps(name, tmp_path, capsys):
    """With a smaller model and text; the optimizer and the kind of architecture are its own."""
    corpus = write_corpus(tmp_path / "text.txt", lines=200)
    config = find_config(name).resolve()
    vocabulary = [] if name.startswith("tiny") else ["--data.vocab_size", "300"]
    status = main(
        ["fit", "--config", str(config), "--data.source", str(corpus), "--data.batch_size", "2",
         "--model.config.n_layer", "2", "--model.config.n_head", "2", "--model.config.d_model",
         "16", "--model.config.block_size", "16", "--trainer.max_steps", "3",
         "--trainer.val_check_interval", "3", "--trainer.accelerator", "cpu", "--tensorboard",
         "false", "--samples.every_n_steps", "null", "--wandb", "off", *vocabulary]
    )  # fmt: skip
    assert status == 0, capsys.readouterr().err
    with open(tmp_path / "runs" / name / "metrics.csv") as file:
        losses = [float(row["val/loss"]) for row in csv.DictReader(file) if row.get("val/loss")]
    assert len(losses) == 1
    assert losses[0] < 6


def test_a_run_goes_on_with_the_optimizer_that_it_began_with(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "text.txt")
    argv = ["fit", "--model.preset", "nano", "--model.config.block_size", "16", "--data.source",
            str(corpus), "--data.tokenizer", "bytes", "--trainer.accelerator", "cpu",
            "--samples.every_n_steps", "null", "--name", "mine", "--tensorboard", "false",
            "--resume"]  # fmt: skip
    assert main([*argv, "--trainer.max_steps", "1"]) == 0, capsys.readouterr().err
    more = [*argv, "--trainer.max_steps", "2"]
    assert main([*more, "--model.optimizer.kind", "muon"]) == 1
    told = capsys.readouterr().err
    assert "model.optimizer.kind was adamw in the checkpoint's run and is muon" in told
    assert main([*more, "--model.optimizer.decays", "[head]"]) == 1
    assert "decays was matrices, embeddings, head in" in capsys.readouterr().err
    assert main(more) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["fit", "--model.preset", "gpt2-124"], 1, "did you mean gpt2-124m"),
        (["fit", "--model.config.n_layer", "0"], 1, "n_layer is 0"),
        (
            ["fit", "--model.config.n_layer", "two"],
            2,
            "model.config.n_layer is 'two', but must be a whole number\n",
        ),
        (["fit", "--checkpoint.every_minutes", "x"], 2, "is 'x', but must be a number or null\n"),
        (["fit", "--tensorboard", "maybe"], 2, "must be true or false"),
        (["fit", "--trainer.devices", "[x"], 1, "trainer.devices [x"),
        (["fit", "--config", "diary.txt"], 2, "diary.txt is not a mapping of settings; a text to"),
        (["fit", "--model.config.n_layr", "2"], 2, "--model.config.n_layr"),
        (["fit", "--model.d_model", "8"], 2, "did you mean --model.config.d_model?"),
        (["fit", "--data.sorce=x"], 2, "did you mean --data.source?"),
        (["fit", "--max_stepz", "2"], 2, "did you mean --trainer.max_steps?"),
        (["fit", "--zzzzzzzz", "2"], 2, "unrecognized arguments: --zzzzzzzz 2\n"),
        (
            ["fit", "--config", "typo.yaml"],
            2,
            "typo.yaml: there is no setting model.config.n_layr; did you mean model.config.n_layer",
        ),
        (
            ["fit", "--config=top.yaml"],
            2,
            "top.yaml: there is no setting modle.preset; did you mean model.preset?",
        ),
        (
            ["fit", "--config", "value.yaml"],
            2,
            "value.yaml: model.optimizer.schedule is 'cosin', but must be one of wsd, trapezoid",
        ),
        (["fit", "--config", "value.yaml"], 2, "constant; did you mean cosine?"),
        (["fit", "--config", "seed.yaml"], 2, "did you mean seed_everything?"),
        (["fit", "--trainer.precision", "bf16-mixd"], 2, "did you mean bf16-mixed?"),
        (["fit", "--resume", "--ckpt_path", "last"], 1, "both given"),
        (["test", "--resume"], 1, "--ckpt_path last"),
        (["fit", "--guard.factor", "0"], 1, "guard.factor is 0"),
        (["fit", "--checkpoint.every_n_steps", "0"], 1, "checkpoint.every_n_steps is 0"),
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
        (["fit", "--runs_dir", "typo.yaml"], 1, "cannot write to the run's folder typo.yaml/run"),
        (["fit", "--trainer.accelerator", "cuda"], 1, "trainer.accelerator is cuda"),
        (["predict"], 2, "'fit', 'validate', 'test'"),
        ([], 2, "fit,validate,test"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(tmp_path, capsys, monkeypatch, arguments, status, told):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (tmp_path / "typo.yaml").write_text("model: {config: {n_layr: 2}}\n")
    (tmp_path / "top.yaml").write_text("modle: {preset: nano}\n")
    (tmp_path / "seed.yaml").write_text("seed: 3\n")
    (tmp_path / "value.yaml").write_text("model: {optimizer: {schedule: cosin}}\n")
    (tmp_path / "broken.yaml").write_text("model: [\n")
    (tmp_path / "diary.txt").write_text("It rained.\nIt rained again.\n")
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("train.py: error: ")
    assert told in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_help_shows_examples_and_what_each_subcommand_does(capsys):
    for arguments, told in (
        (["fit", "--help"], "\n  python train.py fit --config shakespeare-tiny\n"),
        (["--help"], "Measure a run's best checkpoint"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert told in capsys.readouterr().out


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_refused_run_leaves_the_earlier_one_as_it_was_and_a_new_one_says_so(
    tmp_path, corpus, capsys
):
    tiny = ["--data.source", str(corpus), "--data.tokenizer", "bytes", "--data.batch_size", "1",
            "--model.config", "{n_layer: 1, d_model: 8, n_head: 2, block_size: 16}",
            "--samples.max_tokens", "2", "--trainer.accelerator", "cpu"]  # fmt: skip
    assert main(["fit", *tiny, "--trainer.max_steps", "2"]) == 0
    assert "holds a run" not in capsys.readouterr().err
    folder = tmp_path / "runs" / "run"
    before = contents(folder)
    assert folder / "samples.txt" in before
    (tmp_path / "short.txt").write_text("short")
    for more, told in (
        (["--trainer.max_steps", "2", "--ckpt_path", "last"], "at step 2, but trainer.max_steps"),
        (["--trainer.max_steps", "4", "--data.source", "short.txt"], "one block needs 16"),
        (["--trainer.max_steps", "4", "--data.source", "nowhere.txt"], "neither a file"),
        (["--trainer.max_steps", "4", "--ckpt_path", "last", "--model.config.d_model", "16"],
         "another architecture"),
    ):  # fmt: skip
        assert main(["fit", *tiny, *more]) == 1
        assert told in capsys.readouterr().err
        assert contents(folder) == before
    assert main(["fit", *tiny, "--trainer.fast_dev_run", "true"]) == 0
    assert contents(folder) == before
    assert main(["fit", *tiny, "--trainer.max_steps", "1"]) == 0
    told = "runs/run holds a run of 2 steps; starting over (to go on with it: --resume). Its ch"
    assert told in capsys.readouterr().err
    assert (folder / "samples.txt").read_text().count("--- step") == 1


def test_resume_goes_on_with_what_is_whole_begins_where_there_is_nothing_and_ends_when_done(
    tmp_path, corpus, capsys
):
    tiny = ["fit", "--resume", "--data.source", str(corpus), "--data.tokenizer", "bytes",
            "--data.batch_size", "1", "--trainer.accelerator", "cpu", "--samples.max_tokens", "2",
            "--model.config", "{n_layer: 1, d_model: 8, n_head: 2, block_size: 16}",
            "--checkpoint.every_n_steps=1", "--model.optimizer.schedule=constant"]  # fmt: skip
    folder = tmp_path / "runs" / "run"
    last = folder / "checkpoints" / "last.ckpt"

    def run(steps):
        assert main([*tiny, "--trainer.max_steps", str(steps)]) == 0
        out, err = capsys.readouterr()
        assert "error" not in err
        assert "not exact" not in out
        assert yaml.safe_load((folder / "config.yaml").read_text())["resume"] is False
        return out

    assert "nothing to resume in runs/run: it has no checkpoint; starting from the" in run(2)
    shutil.rmtree(folder / "model")
    told = run(2)
    assert "resuming from runs/run/checkpoints/last.ckpt at step 2, nothing left to train" in told
    assert (folder / "model").is_dir()
    assert "last.ckpt at step 2, 1 steps left" in run(3)
    last.write_bytes(last.read_bytes()[:-1000])
    told = run(4)
    assert "last.ckpt is damaged" in told
    assert "resuming from runs/run/checkpoints/previous.ckpt at step 2, 2 steps left" in told
    assert (folder / "samples.txt").read_text().count("--- step") == 2  # of steps 2 and 4
    for path in last.parent.iterdir():
        path.unlink()
        path.write_bytes(b"")
    assert "no whole checkpoint of its own; starting from the beginning" in run(1)
    assert (folder / "samples.txt").read_text().count("--- step") == 1


def test_a_full_disk_ends_with_one_line_and_status_1(tmp_path, corpus, capsys):
    tiny = ["fit", "--data.source", str(corpus), "--data.tokenizer", "bytes",
            "--trainer.accelerator", "cpu", "--samples.every_n_steps", "null",
            "--trainer.max_steps", "2", "--diagnosis.every_n_steps", "null",
            "--model.config", "{n_layer: 1, d_model: 8, n_head: 2, block_size: 16}"]  # fmt: skip
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        assert main(tiny) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    line = capsys.readouterr().err.replace("\r", "\n").splitlines()[-1]
    assert line.startswith("train.py: error: cannot write runs/run/checkpoints/last.ckpt: File too")
    assert not list((tmp_path / "runs" / "run").rglob("*.ckpt*"))


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
    assert list((tmp_path / "runs").iterdir()) == []
