from __future__ import annotations

import pytest
import torch

from gpt.errors import ConfigError, SamplingError
from gpt.training.callbacks import SampleText
from tests.training.small import fit, make_data, make_module


def test_samples_are_shown_and_kept_at_each_validation(tmp_path, corpus, capsys):
    samples = SampleText(prompts=["king", ""], max_tokens=5)
    samples.path = tmp_path / "samples.txt"
    fit(tmp_path, corpus, 4, [samples], val_check_interval=2)
    kept = samples.path.read_text()
    assert [line for line in kept.splitlines() if line.startswith("---")] == [
        "--- step 2", "--- step 2", "--- step 4", "--- step 4",
    ]  # fmt: skip
    assert kept.count("\nking") == 2
    assert "--- step 4\nking" in capsys.readouterr().out


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6]), (None, [])])
def test_samples_may_follow_their_own_rhythm_or_not_come(tmp_path, corpus, every, steps, capsys):
    samples = SampleText(every_n_steps=every, max_tokens=2)
    fit(tmp_path, corpus, 6, [samples], val_check_interval=2, accumulate_grad_batches=2)
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("---")]
    assert shown == [f"--- step {step}" for step in steps]


def test_sampling_changes_nothing_of_the_training(tmp_path, corpus):
    without = fit(tmp_path, corpus, 6, module=make_module(dropout=0.3), val_check_interval=2)
    samples = SampleText(prompts=["my "], every_n_steps=1, max_tokens=3)
    sampled = fit(
        tmp_path, corpus, 6, [samples], module=make_module(dropout=0.3), val_check_interval=2
    )
    assert sampled.gpt.training
    assert all(map(torch.equal, without.gpt.parameters(), sampled.gpt.parameters()))


def test_the_same_model_writes_the_same_sample(tmp_path, corpus):
    samples = SampleText(max_tokens=8)
    module = fit(tmp_path, corpus, 2, module=make_module(dropout=0.5))
    module.gpt.train()
    texts = []
    for i in range(2):
        samples.path = tmp_path / f"{i}.txt"
        samples.sample(module.trainer, module)
        texts.append(samples.path.read_text())
        assert module.gpt.training
    assert texts[0] == texts[1]


def test_a_prompt_that_cannot_be_said_does_not_end_the_run(tmp_path, corpus):
    samples = SampleText(prompts=["文", "x" * 400])
    samples.path = tmp_path / "samples.txt"
    data = make_data(corpus, tokenizer="chars")
    module = fit(tmp_path, corpus, 2, [samples], data=data, val_check_interval=2)
    assert module.trainer.global_step == 2
    assert samples.path.read_text().count("[no sample: ") == 2


def test_settings_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="every_n_steps is -1"):
        SampleText(every_n_steps=-1)
    with pytest.raises(SamplingError, match="temperature"):
        SampleText(temperature=float("nan"))
