"""What a run that goes on must have in common with one that was not cut."""

from __future__ import annotations

import random
import resource
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from gpt import attention
from gpt.errors import CheckpointError, ConfigError
from gpt.native import build, gradients, orthogonal
from gpt.native import kernels as native
from gpt.training.callbacks import FinalValidation, SampleText
from gpt.training.checkpoints import CheckpointSchedule, RunCheckpoints
from gpt.training.ema import EMA
from gpt.training.exactness import broken_exactness
from gpt.training.rng import rng_state, set_rng_state
from gpt.training.run import RunFolder
from gpt.training.storage import find_last_good, verify_checkpoint
from tests.training.small import fit, make_data, make_module, write_corpus

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in build.COMPILERS), reason="no C++ compiler here"
)


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "runs", "a")


def kept(run, **schedule):
    return RunCheckpoints(run, CheckpointSchedule(**schedule))


def step_of(path):
    return torch.load(path, weights_only=True)["global_step"]


class Killed(BaseException):
    """Ends a run where it stands, as a kill would."""


class Kill(Callback):
    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.batch:
            raise Killed


class Seen(Callback):
    """Losses by batch and validation losses by step, the last word counting."""

    def __init__(self):
        self.losses, self.validated = {}, {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses[batch_idx] = float(outputs["loss"])

    def on_validation_end(self, trainer, pl_module):
        at = trainer.global_step
        self.validated.setdefault(at, []).append(pl_module.evaluation.loss)


@pytest.mark.parametrize(
    ("killed_after", "accumulate", "every", "ema", "precision"),
    [
        (9, 1, 1, False, "32-true"),  # saved with a validation due at that step
        (11, 2, 2, True, "32-true"),  # killed inside a step
        (12, 2, 3, True, "bf16-mixed"),
        (14, 3, 1, False, "bf16-true"),
    ],
)
def test_a_killed_run_goes_on_to_the_bit(
    tmp_path, run, killed_after, accumulate, every, ema, precision
):
    corpus = write_corpus(tmp_path / "short.txt", lines=5)  # an epoch ends every few batches
    options = {
        "accumulate_grad_batches": accumulate, "val_check_interval": 5 * accumulate,
        "precision": precision,
    }  # fmt: skip

    def go(name, *more, **given):
        checkpoints = kept(RunFolder(run.runs_dir, name), every_n_steps=every)
        callbacks = [FinalValidation(), *([EMA(0.9)] if ema else []), *more, checkpoints]
        module = make_module(dropout=0.2, config={"attn_dropout": 0.1})
        fit(tmp_path, corpus, 12, callbacks, module=module, **given, **options)
        return module, checkpoints

    straight, parts = Seen(), Seen()
    module, whole = go("straight", straight)
    with pytest.raises(Killed):
        go("a", parts, Kill(killed_after))
    done = step_of(run.last)
    assert done == (killed_after // accumulate) // every * every or done == 5
    again, resumed = go("a", parts, ckpt_path=run.last, seed=99)
    assert parts.losses == straight.losses
    assert parts.validated == straight.validated  # once each: none is left out or done again
    assert all(map(torch.equal, module.parameters(), again.parameters()))
    assert (resumed.best_step, resumed.best_loss) == (whole.best_step, whole.best_loss)
    best = [torch.load(r.best, weights_only=True)["state_dict"] for r in (whole.run, run)]
    assert all(torch.equal(best[0][key], best[1][key]) for key in best[0])


def test_all_random_numbers_go_on():
    state = rng_state(torch.device("cpu"))
    first = (random.random(), np.random.rand(), torch.rand(1).item())
    set_rng_state(state, torch.device("cpu"))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == first


def test_saves_come_by_steps_and_by_minutes(tmp_path, corpus, run):
    seen, clock = [], [0.0]

    class Watch(Callback):
        def on_train_batch_end(self, trainer, *_):
            clock[0] += 60
            seen.append(step_of(run.last) if run.last.is_file() else 0)

    for schedule, wanted in (
        (CheckpointSchedule(every_minutes=None), [0] * 6),
        (CheckpointSchedule(every_minutes=2.5), [0, 0, 0, 3, 3, 3]),
        (CheckpointSchedule(every_n_steps=2), [0, 0, 2, 2, 4, 4]),
    ):
        seen.clear()
        run.last.unlink(missing_ok=True)
        checkpoints = RunCheckpoints(run, schedule, clock=lambda: clock[0])
        fit(tmp_path, corpus, 6, [Watch(), checkpoints])
        assert seen == wanted
        assert step_of(run.last) == 6
    for name in ("every_minutes", "every_n_steps"):
        with pytest.raises(ConfigError, match=f"checkpoint.{name} is 0"):
            CheckpointSchedule(**{name: 0})


def test_validation_falls_between_steps(tmp_path, corpus, run, capsys):
    seen = Seen()
    fit(tmp_path, corpus, 5, [seen, kept(run)], accumulate_grad_batches=3, val_check_interval=4)
    assert list(seen.validated) == [2, 4]
    assert "validating every 6 batches, not 4: a step is 3 batches" in capsys.readouterr().out


def test_a_step_of_other_parts_still_begins_with_a_whole_step(tmp_path, corpus, run, capsys):
    options = {"module": make_module(optimizer={"schedule": "constant"})}
    fit(tmp_path, corpus, 4, [kept(run)], accumulate_grad_batches=2, **options)
    capsys.readouterr()
    batches = []

    class Parts(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            batches.append(len(pl_module._part_nats))

    options = {"module": make_module(optimizer={"schedule": "constant"}), "ckpt_path": run.last}
    fit(tmp_path, corpus, 6, [Parts(), kept(run)], accumulate_grad_batches=3,
        **options)  # fmt: skip
    assert step_of(run.last) == 6
    told = capsys.readouterr().out
    assert "the batches are others, because blocks per step was 8 and is 12" in told


@pytest.mark.parametrize("killed_after", [3, 5])
def test_no_sample_is_there_twice(tmp_path, corpus, run, killed_after):
    """Also not one that was drawn after a checkpoint from before the first sample."""

    def go(*more, **options):
        samples = SampleText(max_tokens=2, every_n_steps=3)
        samples.path = run.samples
        fit(tmp_path, corpus, 6, [samples, *more, kept(run, every_n_steps=2)], **options)

    with pytest.raises(Killed):
        go(Kill(killed_after - 1))
    assert step_of(run.last) == killed_after // 2 * 2
    go(ckpt_path=run.last)
    text = run.samples.read_text()
    assert [line for line in text.splitlines() if line.startswith("---")] == [
        "--- step 3", "--- step 6",
    ]  # fmt: skip


# --- Files ----------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path, corpus, run):
    fit(tmp_path, corpus, 3, [kept(run, every_n_steps=1)])
    assert (step_of(run.last), step_of(run.previous)) == (3, 2)
    return run


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(saved):
    assert find_last_good(saved) == (saved.last, [])
    data = bytearray(saved.last.read_bytes())
    data[len(data) // 2] ^= 1
    for damage in (bytes(data), bytes(data[:-100]), b"", b"not a checkpoint"):
        saved.last.write_bytes(damage)
        found, problems = find_last_good(saved)
        assert found == saved.previous
        assert len(problems) == 1
        assert str(saved.last) in problems[0]
    saved.last.unlink()
    assert find_last_good(saved) == (saved.previous, [])
    saved.previous.write_bytes(b"")
    assert find_last_good(saved)[0] is None
    assert len(find_last_good(saved)[1]) == 1


def test_a_full_disk_harms_no_earlier_checkpoint(tmp_path, corpus, saved):
    before = {p.name: p.read_bytes() for p in saved.last.parent.iterdir()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Full(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 5:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))

    checkpoints = kept(saved, every_n_steps=5)
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*last\.ckpt: File too large"):
            fit(tmp_path, corpus, 7, [Full(), checkpoints], ckpt_path=saved.last)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {p.name: p.read_bytes() for p in saved.last.parent.iterdir()} == before
    assert verify_checkpoint(saved.last) == 3


def test_a_new_run_leaves_nothing_of_the_old_one_to_fall_back_to(tmp_path, corpus, saved):
    fit(tmp_path, corpus, 1, [kept(saved)])
    assert sorted(p.name for p in saved.last.parent.iterdir()) == ["last.ckpt"]


def test_a_new_run_takes_the_model_of_the_old_one_away_with_its_checkpoints(
    tmp_path, corpus, saved
):
    products = [saved.model / "config.json", *saved.report]
    saved.model.mkdir()
    for path in products:
        path.write_text("of the earlier run")
    fit(tmp_path, corpus, 4, [kept(saved)], ckpt_path=saved.last)
    assert all(path.is_file() for path in products), "it is this run's own"
    with pytest.raises(Killed):
        fit(tmp_path, corpus, 5, [kept(saved, every_n_steps=3), Kill(2)])
    assert all(path.is_file() for path in products), "so are its checkpoints"
    with pytest.raises(Killed):
        fit(tmp_path, corpus, 5, [kept(saved, every_n_steps=3), Kill(4)])
    assert sorted(path.name for path in saved.path.iterdir()) == ["checkpoints"]


def test_a_new_run_that_is_killed_at_once_is_not_taken_for_the_old_one(tmp_path, corpus, saved):
    with pytest.raises(Killed):
        fit(tmp_path, corpus, 5, [kept(saved, every_n_steps=3), Kill(1)])
    found, problems = find_last_good(saved)
    assert found is None
    assert "cut off before its first checkpoint" in problems[0]
    assert verify_checkpoint(saved.last) == 3, "the old run's is still there to be named"
    with pytest.raises(Killed):
        fit(tmp_path, corpus, 5, [kept(saved, every_n_steps=3), Kill(3)])
    assert find_last_good(saved) == (saved.last, [])
    assert not saved.begun.exists()


def test_the_best_is_found_again_where_a_kill_parted_it_from_the_last(tmp_path, corpus, run):
    fit(tmp_path, corpus, 4, [FinalValidation(), kept(run)], val_check_interval=2)
    assert step_of(run.best) == 4
    # Killed after the new last.ckpt and before the new best.ckpt.
    run.best.unlink()  # it is the same file as last.ckpt
    run.best.write_bytes(run.previous.read_bytes())
    again = kept(run)
    fit(tmp_path, corpus, 4, [again], ckpt_path=run.last)
    assert (again.best_step, step_of(run.best)) == (4, 4)
    # In another folder the best is only what is brought along.
    other = kept(RunFolder(run.runs_dir, "b"))
    fit(tmp_path, corpus, 4, [other], ckpt_path=run.last)
    assert step_of(other.run.best) == 4
    other = kept(RunFolder(run.runs_dir, "c"))
    fit(tmp_path, corpus, 6, [FinalValidation(), other], ckpt_path=run.best,
        val_check_interval=5)  # fmt: skip
    assert other.best_step in (5, 6)


# --- What breaks exactness ------------------------------------------------------------------------


def test_a_change_that_breaks_exactness_is_said_and_a_harmless_one_is_not(
    tmp_path, corpus, run, capsys
):
    fit(tmp_path, corpus, 2, [kept(run)])
    same = {"log_every_n_steps": 7, "val_check_interval": 3, "gradient_clip_algorithm": "norm"}
    capsys.readouterr()
    fit(tmp_path, corpus, 2, [kept(run)], ckpt_path=run.last, **same)
    assert "not exact" not in capsys.readouterr().out
    other = write_corpus(tmp_path / "other.txt", seed=5)
    fit(tmp_path, other, 3, [kept(run)], ckpt_path=run.last, gradient_clip_val=0.5,
        data=make_data(other, batch_size=2, seed=5),
        module=make_module(dropout=0.1, optimizer={"betas": (0.8, 0.9)}))  # fmt: skip
    told = [line for line in capsys.readouterr().out.splitlines() if "not exact" in line]
    for line, part in zip(told, (
        "the batches are others, because the text's fingerprint was",
        "the batches are others, because seed_everything was 1337 and is 5",
        "the batches are others, because blocks per step was 4 and is 2",
        "results may round otherwise, because data.batch_size was 4 and is 2",
        "random numbers of dropout are others, because model.config.dropout was 0.0 and is 0.1",
        "the learning rate is another, because trainer.max_steps was 2 and is 3",
        "the steps are others, because trainer.gradient_clip_val was 1.0 and is 0.5",
        "the steps are others, because model.optimizer.betas was [0.9, 0.95] and is [0.8, 0.9]",
    ), strict=True):  # fmt: skip
        assert part in line


def test_the_length_of_a_run_counts_only_where_the_rate_depends_on_it():
    before = {"trainer.max_steps": 10, "model.optimizer.schedule": "constant"}
    assert broken_exactness(before, {**before, "trainer.max_steps": 20}) == []
    assert broken_exactness({}, before) == []
    falling = {**before, "model.optimizer.weight_decay_schedule": "linear"}
    assert broken_exactness(falling, {**falling, "trainer.max_steps": 20}) == [
        "not exact: the weight decay is another, because trainer.max_steps was 10 and is 20"
    ]


@needs_compiler
def test_without_the_kernels_that_it_began_with_a_run_rounds_otherwise(
    run, corpus, capsys, monkeypatch
):
    constant = {"schedule": "constant"}
    fit(run.path, corpus, 1, [kept(run)], module=make_module(optimizer=constant))
    had = native.instructions()
    assert had in native.LEVELS, "training on a processor has them compiled"
    native.use(None)
    monkeypatch.setattr(native, "load", lambda: None)
    capsys.readouterr()
    module = make_module(optimizer=constant)
    fit(run.path, corpus, 2, [kept(run)], module=module, ckpt_path=run.last)
    told = [line for line in capsys.readouterr().out.splitlines() if "not exact" in line]
    assert told == [
        f"not exact: results may round otherwise, because kernels was {had} and is none"
    ]


def test_a_run_from_before_there_were_kernels_is_told_of_them():
    before = {"threads": 2}
    assert broken_exactness(before, {**before, "kernels": "none"}) == []
    for dropout, effect in ((0.0, "results may round otherwise"),
                            (0.1, "the random numbers of dropout are others")):  # fmt: skip
        now = {**before, "kernels": "AVX2", "model.config.dropout": dropout}
        assert broken_exactness(before, now) == [
            f"not exact: {effect}, because kernels was none and is AVX2"
        ]


def test_a_run_from_before_neurons_were_evened_out_is_told_of_it():
    before = {"model.optimizer.kind": "muon", "model.optimizer.muon_lr": 0.01}
    now = {**before, "model.optimizer.muon_beta2": 0.95}
    assert broken_exactness(before, now) == [
        "not exact: the steps are others, because model.optimizer.muon_beta2 was 0.0 and is 0.95"
    ]
    assert broken_exactness(before, {**now, "model.optimizer.muon_beta2": 0.0}) == []


@pytest.mark.parametrize("name", ["muon_lr", "muon_momentum", "muon_beta2", "muon_weight_decay"])
def test_without_muon_its_settings_break_nothing(name):
    adamw = {"model.optimizer.kind": "adamw", "model.optimizer.muon_lr": 0.01}
    before, now = ({**adamw, f"model.optimizer.{name}": value} for value in (0.1, 0.2))
    assert broken_exactness(before, now) == []
    muon = {"model.optimizer.kind": "muon"}
    assert len(broken_exactness(before | muon, now | muon)) == 1


@needs_compiler
def test_all_that_learns_runs_through_kernels_and_goes_on_to_the_bit(tmp_path, run, monkeypatch):
    """Of an architecture and an optimizer that use each of them."""
    counted = Counter()
    for owner, name in (
        (gradients, "rms_norm"), (gradients, "convolve"), (gradients, "square_relu"),
        (gradients, "take_apart"), (gradients, "add_dropped"), (attention, "causal_attention"),
        (orthogonal, "step"), (gradients, "keep_freed_memory"),
    ):  # fmt: skip
        whole = getattr(owner, name)

        def noted(*args, _name=name, _whole=whole):
            counted[_name] += 1
            return _whole(*args)

        monkeypatch.setattr(owner, name, noted)
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    corpus = write_corpus(tmp_path / "short.txt", lines=5)

    def go(name, *more, **given):
        module = make_module(
            dropout=0.2,
            config={"conv_width": 3, "mlp": "relu2", "qk_norm": True},
            optimizer={"kind": "muon"},
        )
        checkpoints = kept(RunFolder(run.runs_dir, name), every_n_steps=2)
        fit(tmp_path, corpus, 6, [*more, checkpoints], module=module, **given)
        return module

    straight = go("straight")
    assert set(counted) == {
        "rms_norm", "convolve", "square_relu", "take_apart", "add_dropped", "causal_attention",
        "step", "keep_freed_memory",
    }  # fmt: skip
    with pytest.raises(Killed):
        go("a", Kill(4))
    again = go("a", ckpt_path=run.last, seed=99)
    torch.set_num_threads(torch_threads)
    assert all(map(torch.equal, straight.parameters(), again.parameters()))


def test_a_checkpoint_is_plain_data_whatever_clips_the_gradients(run, corpus):
    """Lightning makes an enumeration of the name, which nobody could load."""
    fit(run.path, corpus, 1, [kept(run)], gradient_clip_algorithm="value")
    saved = torch.load(run.last, weights_only=True)
    assert saved["settings"]["trainer.gradient_clip_algorithm"] == "value"
