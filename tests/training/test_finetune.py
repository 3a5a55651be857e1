"""Runs that begin with a model: all of it trained, or adapters beside it."""

from __future__ import annotations

import csv
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback

from gpt.checkpoint import load_model, save_model
from gpt.errors import CheckpointError, ConfigError
from gpt.lora import AdaptedLinear, LoRAConfig
from gpt.training.base import check_given_tokenizer, defaults_from
from gpt.training.callbacks import FinalValidation
from gpt.training.checkpoints import CheckpointSchedule, ExportModel, RunCheckpoints
from gpt.training.cli import main
from gpt.training.ema import EMA
from gpt.training.finetune import BaseValidation, begin_with
from gpt.training.memory import MemoryCheck
from gpt.training.module import GPTModule
from gpt.training.record import RunRecord
from gpt.training.run import RunFolder
from gpt.training.sharding import FSDP2Strategy
from tests.training.small import fit, make_data, make_module, write_corpus

CONTEXT, BLOCK = 32, 16
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
OTHER = "a small red fox runs over green hills while rain falls on old stone roads"


def other_corpus(path: Path) -> Path:
    """Of other words than the base's."""
    pick = random.Random(1)
    path.write_text("".join(" ".join(pick.choices(OTHER.split(), k=8)) + "\n" for _ in range(60)))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, trained a little, with a context twice as long as the blocks below."""
    folder = tmp_path_factory.mktemp("base")
    corpus = write_corpus(folder / "text.txt")
    module = make_module(config={"block_size": CONTEXT}, optimizer={"lr": 0.01})
    fit(folder, corpus, 40, module=module, data=make_data(corpus, block_size=CONTEXT))
    save_model(folder / "model", module.gpt, module.tokenizer, name="elder", chat_template=TEMPLATE)
    return folder / "model"


def begun(base: Path, corpus: Path, *, goes_on: Path | None = None, **options: Any) -> Any:
    """Module and data of a run that begins with the base, as the command line makes them."""
    config = {"block_size": CONTEXT, "vocab_size": 257, **options.pop("config", {})}
    of_data = {"block_size": BLOCK, "tokenizer": str(base), **options.pop("of_data", {})}
    module = make_module(config=config, init_from=str(base), **options)
    data = make_data(corpus, **of_data)
    begin_with(module, data, None, goes_on)
    return module, data


class Killed(BaseException):
    """Ends a run where it stands, as a kill would."""


class Kill(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 8:
            raise Killed


def content(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ("lora", "precision", "ema"),
    [
        (LoRAConfig(rank=2, dropout=0.2), "32-true", True),
        (LoRAConfig(rank=2, matrices=("attn.qkv", "mlp.down")), "bf16-true", False),
        (LoRAConfig(), "bf16-mixed", False),
    ],
)
def test_a_killed_run_goes_on_to_the_bit_without_the_base(
    tmp_path: Path, base: Path, lora: LoRAConfig, precision: str, ema: bool
) -> None:
    corpus = other_corpus(tmp_path / "other.txt")
    there = shutil.copytree(base, tmp_path / "there")
    options = {"precision": precision, "val_check_interval": 5}

    def start(run: RunFolder, kill: bool, goes_on: Path | None = None) -> dict[str, Any]:
        module, data = begun(
            there, corpus, goes_on=goes_on, lora=lora, config={"dropout": 0.1},
            optimizer={"lr": 0.01, "ema_decay": 0.9 * ema},
        )  # fmt: skip
        saving = RunCheckpoints(run, CheckpointSchedule(every_n_steps=3))
        callbacks = [EMA(0.9)] * ema + [FinalValidation(), BaseValidation(), *[Kill()] * kill]
        try:
            fit(tmp_path, corpus, 11, [*callbacks, saving], module=module, data=data,
                ckpt_path=goes_on, **options)  # fmt: skip
        except Killed:
            shutil.rmtree(there)
            return start(run, False, run.last)
        return content(run.last)

    straight = start(RunFolder(tmp_path / "runs", "straight"), False)
    resumed = start(RunFolder(tmp_path / "runs", "cut"), True)
    assert not there.exists()
    for part in ("state_dict", "optimizer_states", "callbacks"):
        for each in (resumed, straight):
            for group in each[part][0]["param_groups"] if part == "optimizer_states" else ():
                assert group.pop("kind") == "adamw"
        torch.testing.assert_close(resumed[part], straight[part], rtol=0, atol=0)
    (loss,) = (v["loss"] for k, v in straight["callbacks"].items() if "BaseValidation" in k)
    assert loss > 0
    # Adapters have state in the optimizer, and nothing else; they are float32 under any precision.
    names = [name for name in straight["state_dict"] if ".lora." in name]
    if lora.on:
        (optimizer,) = straight["optimizer_states"]
        assert len(optimizer["state"]) == len(names) == 2 * len(lora.matrices)
        assert {straight["state_dict"][name].dtype for name in names} == {torch.float32}
    else:
        assert not names


def test_adapters_learn_beside_a_base_that_stays_and_are_merged_on_export(
    tmp_path: Path, base: Path
) -> None:
    corpus = other_corpus(tmp_path / "other.txt")
    lora = LoRAConfig(rank=4)
    module, data = begun(base, corpus, lora=lora, optimizer={"lr": 0.02, "weight_decay": 0.1})
    run = RunFolder(tmp_path / "runs", "a")
    saving = RunCheckpoints(run)
    memory, first = MemoryCheck(), BaseValidation()
    callbacks = [memory, FinalValidation(), first, RunRecord(run), ExportModel(run, saving), saving]
    fit(tmp_path, corpus, 60, callbacks, module=module, data=data, val_check_interval=30)

    # The loss of other words fell below the base model's.
    best = saving.best_loss
    assert first.loss is not None
    assert best < first.loss - 0.5
    # Nothing of the base moved.
    before, saved = load_model(base).model.state_dict(), content(run.last)["state_dict"]
    for name, weight in before.items():
        assert torch.equal(saved[f"gpt.{name}"], weight), name
    # The folder is a plain model with the base's context, tokenizer and chat template.
    loaded = load_model(run.model)
    assert not any(isinstance(layer, AdaptedLinear) for layer in loaded.model.modules())
    assert loaded.model.config == load_model(base).model.config
    assert loaded.chat_template == TEMPLATE
    assert loaded.tokenizer.fingerprint == load_model(base).tokenizer.fingerprint
    assert loaded.training["base"] == {"init_from": str(base), "val_loss": first.loss}
    assert json.loads((run.path / "run.json").read_text())["init_from"] == str(base)
    # It says what the adapted model says, and so does the checkpoint when it is opened.
    ids = torch.randint(0, 256, (2, CONTEXT), generator=torch.Generator().manual_seed(0))
    logits = module.gpt.eval()(ids)
    torch.testing.assert_close(load_model(run.last).model(ids), logits, rtol=1e-4, atol=1e-4)
    if saving.best_step == 60:
        torch.testing.assert_close(loaded.model(ids), logits, rtol=1e-4, atol=1e-4)
    assert load_model(run.last).chat_template == TEMPLATE


def test_the_whole_model_is_trained_without_lora(tmp_path: Path, base: Path) -> None:
    corpus = other_corpus(tmp_path / "other.txt")
    module, data = begun(base, corpus, optimizer={"lr": 0.005})
    first = BaseValidation()
    fit(tmp_path, corpus, 20, [FinalValidation(), first], module=module, data=data)
    assert first.loss is not None
    assert module.evaluation is not None
    assert module.evaluation.loss < first.loss - 0.5
    before = load_model(base).model.state_dict()
    now = module.gpt.state_dict()
    assert set(now) == set(before)
    assert all(not torch.equal(now[name], before[name]) for name in before)


def test_the_first_validation_is_that_of_the_base_and_leaves_training_as_it_is(
    tmp_path: Path, base: Path
) -> None:
    corpus = other_corpus(tmp_path / "other.txt")

    def losses(*callbacks: Callback) -> tuple[list[float], GPTModule]:
        seen: list[float] = []

        class Seen(Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                seen.append(float(outputs["loss"]))

        module, data = begun(base, corpus, config={"dropout": 0.3})
        fit(tmp_path, corpus, 3, [Seen(), *callbacks], module=module, data=data)
        return seen, module

    first = BaseValidation()
    with_it, _ = losses(first)
    without, module = losses()
    assert with_it == without
    # The same number as from the untrained base, measured alone.
    other, data = begun(base, corpus)
    trainer = module.trainer
    trainer.validate(other, datamodule=data, verbose=False)
    assert other.evaluation.loss == first.loss


# --- On the command line --------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    other_corpus(tmp_path / "other.txt")
    shutil.copytree(base, tmp_path / "base")
    return tmp_path


GIVEN = ["fit", "--model.init_from", "base", "--data.source", "other.txt", "--trainer.accelerator",
         "cpu", "--tensorboard", "false", "--samples.every_n_steps", "null", "--name", "mine",
         "--data.batch_size", "4", "--trainer.log_every_n_steps", "1"]  # fmt: skip


def validations(run: Path) -> dict[int, float]:
    rows = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    return {int(row["step"]): float(row["val/loss"]) for row in rows if row["val/loss"]}


def test_a_run_on_the_command_line_and_its_resume_without_the_base(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = ["--model.lora.rank", "2", "--data.block_size", "16", "--model.optimizer.lr", "0.02"]
    short = ["--trainer.max_steps", "8", "--trainer.val_check_interval", "4"]
    assert main([*GIVEN, *lora, *short]) == 0, capsys.readouterr().err
    told = capsys.readouterr()
    assert "base:  base, frozen; LoRA trains" in told.out + told.err
    assert "in blocks of 16" in told.out + told.err
    assert "base model's val/loss is" in told.out + told.err
    config = yaml.safe_load(Path("runs/mine/config.yaml").read_text())
    assert config["model"]["config"]["block_size"] == CONTEXT  # the base's, as all of it
    assert (config["data"]["tokenizer"], config["data"]["block_size"]) == ("base", 16)
    by_step = validations(Path("runs/mine"))
    assert sorted(by_step) == [0, 4, 8]
    assert by_step[8] < by_step[0]
    page = Path("runs/mine/report.html").read_text()
    assert "base model" in page
    assert f"{by_step[0]:.4f} nats per token" in page
    shutil.rmtree("base")
    again = ["fit", "--config", "runs/mine/config.yaml", "--resume", "--trainer.max_steps", "10"]
    assert main(again) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert list(validations(Path("runs/mine"))) == [0, 4, 8, 10]
    assert load_model("runs/mine").chat_template == TEMPLATE
    assert main(["validate", "--config", "runs/mine/config.yaml"]) == 0, capsys.readouterr().err
    other = ["--trainer.max_steps", "12", "--model.lora.rank", "3"]
    assert main(["fit", "--config", "runs/mine/config.yaml", "--resume", *other]) == 1
    assert "model.lora.rank was 2 in the checkpoint's run and is 3" in capsys.readouterr().err


def test_learning_rates_are_smaller_unless_they_are_given(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*GIVEN, "--model.lora.rank", "8", "--print_config"])
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["model"]["config"]["n_layer"] == 1  # the base's, not the default
    assert found["model"]["optimizer"]["lr"] == 5e-4
    assert defaults_from(None, "base", LoRAConfig())["model.optimizer.lr"] == 5e-5


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--model.config.n_layer", "2"], "n_layer is 2, but the model in base has 1"),
        (["--data.block_size", "64"], "the model's context (model.config.block_size) is 32"),
        (["--model.init_from", "models/smollm2"], "`make smollm2` makes models/smollm2"),
        (["--model.lora.matrices", "[head]"], "attn.qkv"),
    ],
)
def test_what_contradicts_the_model_is_refused_in_a_line(
    here: Path, more: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GIVEN, "--trainer.max_steps", "1", *more]) in (1, 2)
    said = capsys.readouterr().err
    assert told in said
    assert said.splitlines()[-1].startswith("train.py: error: ")
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


@pytest.mark.parametrize(
    ("config", "module_options", "data_options", "told"),
    [
        ({"mlp": "swiglu"}, {}, {}, "mlp is swiglu, but the model in .* has relu2"),
        ({"block_size": 16}, {}, {}, r"data\.block_size 16"),
        ({"block_size": 64}, {}, {}, "block_size is 64, but the model in .* has 32; leave it out$"),
        ({}, {"preset": "nano"}, {}, "only one can say what the model is"),
        ({}, {}, {"tokenizer": "bpe"}, r"data\.tokenizer is bpe, but the model in .* has its own"),
        ({}, {}, {"tokenizer": "nowhere"}, r"leave data\.tokenizer out"),
        ({}, {}, {"special_tokens": ["<x>"]}, r"data\.special_tokens has '<x>', which"),
    ],
)
def test_what_contradicts_the_model_is_named(
    base: Path, corpus: Path, config: Any, module_options: Any, data_options: Any, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        begun(base, corpus, config=config, of_data=data_options, **module_options)


def test_what_needs_a_model_to_begin_with_is_refused_without(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model to adapt; give model\.init_from"):
        begin_with(make_module(lora=LoRAConfig(rank=4)), make_data(corpus), None, None)
    with pytest.raises(ConfigError, match="would never learn the positions between"):
        fit(tmp_path, corpus, 1, data=make_data(corpus, block_size=8))


def test_adapters_are_refused_where_weights_are_sharded(base: Path, corpus: Path) -> None:
    module, data = begun(base, corpus, lora=LoRAConfig(rank=2))
    module.trainer = SimpleNamespace(strategy=FSDP2Strategy(), datamodule=data, max_steps=1)
    with pytest.raises(ConfigError, match="fsdp2 shards what is trained"):
        module.setup("fit")


def test_the_same_tokenizer_may_be_given_by_another_name(base: Path, corpus: Path) -> None:
    tokenizer = load_model(base).tokenizer
    data = make_data(corpus)  # bytes, which are the base's
    check_given_tokenizer(data, "elsewhere", tokenizer)
    data.given_tokenizer = str(base / "tokenizer.json")
    check_given_tokenizer(data, "elsewhere", tokenizer)
    data.given_tokenizer = "chars"
    with pytest.raises(ConfigError, match=r"data\.tokenizer is chars"):
        check_given_tokenizer(data, "elsewhere", tokenizer)


def test_a_checkpoint_with_adapters_that_lie_is_refused(tmp_path: Path, base: Path) -> None:
    corpus = other_corpus(tmp_path / "other.txt")
    module, data = begun(base, corpus, lora=LoRAConfig(rank=2))
    run = RunFolder(tmp_path / "runs", "a")
    fit(tmp_path, corpus, 1, [RunCheckpoints(run)], module=module, data=data)
    saved = content(run.last)
    for lora in ({"rank": 3}, {"rank": 0}, {"rank": "2"}, {"rnk": 2}, [2], {"rank": 10**12}):
        saved["antiphon"]["lora"] = lora
        torch.save(saved, tmp_path / "other.ckpt")
        with pytest.raises(CheckpointError):
            load_model(tmp_path / "other.ckpt")
