from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gpt.errors import CheckpointError, ConfigError
from gpt.training.run import RunFolder, find_config, shipped_configs


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "/tmp"])
def test_a_name_that_is_no_folders_is_refused(name):
    with pytest.raises(ConfigError, match="the run's name"):
        RunFolder(Path("runs"), name)


def test_a_checkpoint_may_be_called_best_last_or_by_its_path(tmp_path):
    run = RunFolder(tmp_path, "a")
    run.best.parent.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*best\.ckpt; train first"):
        run.checkpoint("best")
    run.last.touch()
    with pytest.raises(CheckpointError, match=r"but last\.ckpt is there: --ckpt_path last"):
        run.checkpoint("best")
    with pytest.raises(CheckpointError, match="give --ckpt_path best, last or a file"):
        run.checkpoint("nowhere.ckpt")
    for path in (run.best, run.last, tmp_path / "x.ckpt"):
        path.touch()
    assert run.checkpoint("best") == run.best
    assert run.checkpoint("last") == run.last
    assert run.checkpoint(str(tmp_path / "x.ckpt")) == tmp_path / "x.ckpt"


def test_a_config_may_be_a_file_or_a_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("shakespeare-tiny").is_file()
    assert find_config("shakespeare-tiny.yaml") == find_config("shakespeare-tiny")
    Path("shakespeare-tiny.yaml").touch()
    assert find_config("shakespeare-tiny.yaml") == Path("shakespeare-tiny.yaml")
    with pytest.raises(ConfigError, match="did you mean shakespeare-tiny"):
        find_config("shakespear-tiny")
    with pytest.raises(ConfigError, match=r"no config 'here/shakespeare-tiny\.yaml'"):
        find_config("here/shakespeare-tiny.yaml")


@pytest.mark.parametrize("name", shipped_configs())
def test_a_shipped_config_says_what_it_is_and_names_its_run_after_itself(name):
    text = shipped_configs()[name].read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert f"fit --config configs/{name}.yaml" in text
    assert yaml.safe_load(text)["name"] == name
