"""What a stranger's folder can claim: refused with a line that names it, in bounded memory."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from gpt.errors import CheckpointError
from gpt.weights.command import open_source, read_weights
from tests.weights.foreign import LLAMA, llama_tensors, write_llama

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "theirs")


def read(path: Path) -> None:
    read_weights(open_source(path, vocabulary=False))


def test_the_folder_itself_is_good(folder: Path) -> None:
    read(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 10**9}, "claims 1000000000 layers, but the weights have 2"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 1000.*from 1 to 2"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": 10**30}, "hidden_size is 1000"),
        ({"hidden_size": 2**31}, "has the shape"),
        ({"hidden_size": -4}, "hidden_size is -4"),
        ({"hidden_size": "wide"}, "hidden_size is wide"),
        ({"hidden_size": 18}, "d_model 18 is not divisible by n_head 4"),
        ({"vocab_size": 301}, r"embed_tokens.weight has the shape \[300, 16\]"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"num_key_value_heads": 3}, "n_head 4 is not divisible by n_kv_head 3"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"model_type": "mamba"}, "model_type is mamba; the families"),
        ({"model_type": ["llama"]}, r"model_type is \[.llama"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu, which is not supported"),
        ({"attention_bias": "yes"}, "attention_bias is yes"),
        ({"attention_bias": True}, r"lacks the tensor 'model.layers.0.self_attn.q_proj.bias'"),
        ({"tie_word_embeddings": True}, "lm_head.weight is not"),
        ({"embedding_multiplier": 12.0}, "sets embedding_multiplier, which is not known"),
        ({"quantization_config": {"bits": 4}}, "sets quantization_config"),
        ({"sliding_window": 8}, "sliding_window is 8, which is not supported"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.* Up to 32 tokens"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is longrope"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling in .*: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_factor is 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}}, "sets beta"),
        ({"rope_scaling": [1]}, "rope_scaling in .* is no object"),
    ],
)
def test_a_setting_is_named(folder: Path, changes: dict[str, Any], says: str) -> None:
    write_llama(folder, **changes)
    with pytest.raises(CheckpointError, match=says) as caught:
        read(folder)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", "is no JSON object"),
        ("null", "is no JSON object"),
        ("{", "is not usable JSON"),
        ("", "is not usable JSON"),
        ('{"rope_theta": NaN}', "holds NaN"),
        ('{"rope_theta": -Infinity}', "holds -Infinity"),
        ("[" * 100_000, "is not usable JSON"),
        ('{"hidden_size": 1' + "0" * 5000 + "}", "is not usable JSON|hidden_size|model_type"),
        (b"\xff\xfe", "is no UTF-8 text"),
    ],
)
def test_a_configuration_that_is_none(folder: Path, text: str | bytes, says: str) -> None:
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=says):
        read(folder)


def table(header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        table(b"{}", length=2**62),
        table({"a": entry([2**60], 0, 2**62)}, b"1234"),
        table({"a": entry([2**40, 2**40], 0, 4)}, b"1234"),
        table({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, b"1234"),
        table({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"0" * 12),
        table({"a": entry([1], 4, 8)}, b"0" * 8),
        table({"a": entry([1], 0, 4)}, b"0" * 400),
        table({"a": entry([-1], 0, 4)}, b"1234"),
        table(b'{"a": [1]}', b"1234"),
        table(b"[]"),
    ],
    ids=["empty", "zip", "header-of-4-EiB", "tensor-of-4-EiB", "overflow", "same-place",
         "overlap", "gap", "rest", "negative", "no-entry", "no-object"],
)  # fmt: skip
def test_a_safetensors_file_that_lies(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no readable safetensors"):
        read(folder)


def test_a_truncated_file_is_told(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size in (4, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="is no readable safetensors file"):
            read(folder)


def test_a_tensor_listed_twice_with_two_places_is_refused(folder: Path) -> None:
    twice = b'{"a": %s, "a": %s}' % tuple(json.dumps(entry([1], i, i + 4)).encode() for i in (0, 4))
    (folder / "model.safetensors").write_bytes(table(twice, b"0" * 8))
    with pytest.raises(CheckpointError, match="is no readable safetensors file"):
        read(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks the tensor 'model.norm.weight'"),
        (lambda t: t.update(extra=torch.ones(1)), "has a tensor 'extra' that"),
        (
            lambda t: t.update({"model.layers.1.self_attn.q_norm.weight": torch.ones(4)}),
            "has a tensor 'model.layers.1.self_attn.q_norm.weight'",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(17)}), r"shape \[17\]"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(16, dtype=torch.int8)}),
            "model.norm.weight is stored as int8",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(16).to(torch.float8_e4m3fn)}),
            "model.norm.weight is stored as float8_e4m3fn",
        ),
        (
            lambda t: t.update({"model.layers.7.input_layernorm.weight": torch.ones(16)}),
            "claims 2 layers, but the weights have 3",
        ),
    ],
)
def test_a_tensor_is_named(tmp_path: Path, change: Callable[[dict], Any], says: str) -> None:
    tensors = llama_tensors()
    change(tensors)
    with pytest.raises(CheckpointError, match=says):
        read(write_llama(tmp_path / "theirs", tensors))


def sharded(folder: Path, weight_map: Any, **files: dict[str, torch.Tensor]) -> Path:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, tensors in files.items():
        (folder / f"{name}.safetensors").write_bytes(save(tensors))
    return folder


@pytest.mark.parametrize(
    "file",
    ["/etc/passwd", "../theirs/a.safetensors", "..", ".", "", "sub/a.safetensors", "a\0b", 7, None,
     "..\\a.safetensors", "x" * 5000],
)  # fmt: skip
def test_an_index_cannot_lead_out_of_the_folder(folder: Path, file: Any) -> None:
    sharded(folder, dict.fromkeys(llama_tensors(), file), a=llama_tensors())
    with pytest.raises(CheckpointError, match=r"which is not beside it|which is not there"):
        read(folder)


def test_shards_and_index_must_agree(folder: Path) -> None:
    tensors = llama_tensors()
    everything = dict.fromkeys(tensors, "a.safetensors")
    sharded(folder, everything, a=tensors)
    read(folder)
    index = folder / "model.safetensors.index.json"
    other = {"model.norm.weight": torch.ones(16)}
    (folder / "b.safetensors").write_bytes(save(other))
    for listed, says in [
        ({**everything, "model.norm.weight": "b.safetensors"}, "is in two files: a.* and b"),
        ({**everything, "more": "a.safetensors"}, "'more' is not in a.safetensors"),
        ({k: v for k, v in everything.items() if "norm" not in k}, "does not list the tensor"),
        ([], "has no weight_map"),
        ({}, "has no weight_map"),
    ]:
        index.write_text(json.dumps({"weight_map": listed}))
        with pytest.raises(CheckpointError, match=says):
            read(folder)


class _RunsCode:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def as_bin(folder: Path, value: Any, **options: Any) -> Path:
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(value, folder / "pytorch_model.bin", **options)
    return folder


def test_a_pickle_cannot_run_code(folder: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    for value in (_RunsCode(trap), {**llama_tensors(), "x": _RunsCode(trap)}):
        as_bin(folder, value)
        with pytest.raises(CheckpointError, match="cannot be read as data alone"):
            read(folder)
        assert not trap.exists()


def test_what_is_no_tensor_in_a_pickle_is_named(folder: Path) -> None:
    good = llama_tensors()
    norm = "model.norm.weight"
    for value, says in [
        ([1], "holds no tensors by name"),
        ({**good, "step": 7}, "'step' is no tensor"),
        ({**good, norm: torch.ones(1).expand(16)}, f"{norm} is no plain array"),
        ({**good, norm: torch.ones(16).to_sparse()}, f"{norm} is no plain array"),
        ({**good, norm: torch.ones(16, device="meta")}, f"{norm} is no plain array"),
    ]:
        with pytest.raises(CheckpointError, match=says):
            read(as_bin(folder, value))
    with pytest.raises(CheckpointError, match=r"since version 1\.6"):
        read(as_bin(folder, good, _use_new_zipfile_serialization=False))
    # A tensor that is only laid out otherwise is a tensor.
    turned = {name: value.t().contiguous().t() for name, value in good.items()}
    read(as_bin(folder, turned))


def test_an_archive_cannot_unpack_to_more_than_it_is(folder: Path) -> None:
    as_bin(folder, {"a": torch.zeros(1 << 20)})
    file, packed = folder / "pytorch_model.bin", io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    file.write_bytes(packed.getvalue())
    assert file.stat().st_size < 1 << 16
    with pytest.raises(CheckpointError, match="is packed, which torch's checkpoints are not"):
        read(folder)


def test_what_is_at_a_path_is_told(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(LLAMA))
    for name, says in [
        ("nowhere", "there is nothing at"),
        ("x" * 5000, "there is nothing at"),
        ("a\0b", "there is nothing at"),
        ("text", "is neither a .gguf file nor a checkpoint of nanoGPT"),
        ("empty", "is no model that is known here"),
        ("lora", "is an adapter; merge it"),
        ("bare", "has no weights: neither model.safetensors nor"),
    ]:
        with pytest.raises(CheckpointError, match=says):
            open_source(tmp_path / name)


MEASURE = """
import resource, sys
from pathlib import Path
import torch
from gpt.checkpoint import write_folder
from gpt.tokenizer import Tokenizer
from gpt.weights.command import open_source, read_weights
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source, out = map(Path, sys.argv[1:])
tokenizer = Tokenizer.bytes()
read_weights(open_source(source.parent / "small", vocabulary=False))  # what the code itself takes
before = peak()
foreign = open_source(source, vocabulary=False)
write_folder(out, foreign.config, read_weights(foreign), tokenizer)
print((peak() - before) * 1024, (out / "model.safetensors").stat().st_size)
"""


def test_an_import_takes_one_copy_of_the_model(tmp_path: Path) -> None:
    """150 MB of weights in four files, nearly all of them stacked on the way."""
    write_llama(tmp_path / "small")
    folder = write_llama(
        tmp_path / "large", hidden_size=1024, intermediate_size=4096, num_hidden_layers=2,
        num_key_value_heads=4, vocab_size=1000,
    )  # fmt: skip
    C, F = 1024, 4096
    shapes = {name: list(value.shape) for name, value in llama_tensors().items()}
    size = {300: 1000, 16: C, 8: C, 24: F}
    tensors = {n: torch.ones([size[d] for d in shape]) for n, shape in shapes.items()}
    parts: list[dict[str, torch.Tensor]] = [{}, {}, {}, {}]
    for i, (name, value) in enumerate(tensors.items()):
        parts[i % 4][name] = value
    files = {f"part{i}": part for i, part in enumerate(parts)}
    where = {name: f"{file}.safetensors" for file, part in files.items() for name in part}
    sharded(folder, where, **files)
    del tensors, parts, files
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), str(tmp_path / "out")],
        capture_output=True, text=True, cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    taken, model = map(int, done.stdout.split())
    assert model > 100e6
    assert taken < 1.4 * model, f"{taken / model:.2f} copies"
