"""Reading a model's files by name and by slices."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantized_folders import BLOCK, in_4_bits, in_8_bits
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nemo_offload_rl.backends.hf.weight_files import WeightFiles, check_same_tensors
from nemo_offload_rl.errors import UserError

TENSORS = {
    "odd": torch.randn(7, 5, generator=torch.Generator().manual_seed(0)),
    "bias": torch.arange(9).to(torch.bfloat16),
    "half": torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1)).half(),
}


def index_of(files: dict[str, list[str]]) -> str:
    return json.dumps({"weight_map": {name: file for file, names in files.items() for name in names}})


@pytest.fixture(scope="module", params=["safetensors", "two-files", "bin", "bin-of-old"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    match request.param:
        case "safetensors":
            save_file(TENSORS, path / "model.safetensors")
            save_file({"other": torch.zeros(2)}, path / "consolidated.safetensors")  # not the model's
        case "two-files":
            save_file({"odd": TENSORS["odd"]}, path / "a.safetensors")
            save_file({name: TENSORS[name] for name in ("bias", "half")}, path / "b.safetensors")
            index = index_of({"a.safetensors": ["odd"], "b.safetensors": ["bias", "half"]})
            (path / "model.safetensors.index.json").write_text(index)
        case "bin":
            torch.save(TENSORS, path / "pytorch_model.bin")
        case _:
            torch.save(TENSORS, path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return path


@given(data=st.data())
def test_any_part_of_any_tensor_is_that_of_the_tensor_in_the_files_type(folder: Path, data: st.DataObject) -> None:
    files = WeightFiles(str(folder))
    assert files.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    for _ in range(3):
        name = data.draw(st.sampled_from(sorted(TENSORS)))
        begins = [data.draw(st.integers(0, size)) for size in TENSORS[name].shape]
        extents = [data.draw(st.integers(0, size - low)) for size, low in zip(TENSORS[name].shape, begins, strict=True)]
        where = tuple(slice(low, low + extent) for low, extent in zip(begins, extents, strict=True))
        part = files.read(name, begins, extents)
        assert part.dtype == TENSORS[name].dtype
        assert torch.equal(part, TENSORS[name][where])


def test_a_file_that_cannot_be_mapped_says_what_it_costs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    WeightFiles(str(tmp_path))
    assert "every rank reads all of its" in caplog.text


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_was_cut_off_is_named(tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    save_file(TENSORS, path) if path.suffix == ".safetensors" else torch.save(TENSORS, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=f"{file}.*copy it again") as error:
        WeightFiles(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_no_weight_can_have_is_refused_with_tensor_and_file(
    tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    tensor = torch.randn(5, 6, dtype=dtype)
    tensor[3, 4] = value
    save_file({"sound": torch.full((2,), 1e18), "damaged": tensor}, tmp_path / "model.safetensors")
    files = WeightFiles(str(tmp_path))
    files.read("sound", (0,), (2,))
    files.read("damaged", (0, 0), (3, 6))
    shown = "NaN" if math.isnan(value) else f"{float(tensor[3, 4]):g}"
    words = rf"have {re.escape(shown)} in damaged \(.*model\.safetensors\); the file is damaged"
    with pytest.raises(UserError, match=words) as error:
        files.read("damaged", (3, 1), (2, 4))
    assert "\n" not in str(error.value)


def test_quantized_tensors_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no weights \(model\.safetensors, "):
        WeightFiles(str(tmp_path))
    save_file({"w": torch.zeros(2, 2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"has w as I8.*quantized weights of this kind cannot be read"):
        WeightFiles(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index_of({"gone.safetensors": ["w"]}))
    with pytest.raises(UserError, match=r"1 missing files, first gone\.safetensors"):
        WeightFiles(str(tmp_path))


SHAPES = st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=4)


@given(wanted=SHAPES, found=SHAPES, harmless=st.sampled_from([(), ("a|b",)]))
def test_names_and_shapes_agree_in_both_directions_or_are_refused(wanted, found, harmless) -> None:
    ignored = set("ab") if harmless else set()
    agrees = wanted == {name: shape for name, shape in found.items() if name in wanted or name not in ignored}
    try:
        check_same_tensors("m", wanted, found, harmless)
    except UserError as error:
        assert not agrees
        assert "\n" not in str(error)
    else:
        assert agrees


def test_parts_of_weights_in_8_bits_are_products_rounded_to_bfloat16(tmp_path: Path) -> None:
    """With blocks that do not divide the shape, and one factor for a whole tensor."""
    weight = torch.randn(70, 100, generator=torch.Generator().manual_seed(0))
    stored = {f"w{end}": part for end, part in in_8_bits(weight).items()}
    whole = {"v": stored["w"].clone(), "v_scale_inv": torch.tensor(0.3), "v.input_scale": torch.tensor(2.0)}
    save_file({**stored, **whole}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": BLOCK}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = WeightFiles(str(tmp_path))
    assert files.shapes == {"w": (70, 100), "v": (70, 100)}
    rows, columns = torch.arange(70)[:, None] // BLOCK[0], torch.arange(100)[None] // BLOCK[1]
    expected = (stored["w"].float() * stored["w_scale_inv"][rows, columns]).bfloat16()
    assert (expected - weight).abs().max() < weight.abs().max() / 16
    for offsets, sizes in (((0, 0), (70, 100)), ((31, 47), (2, 2)), ((33, 0), (37, 100)), ((69, 99), (1, 1))):
        where = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        assert torch.equal(files.read("w", offsets, sizes), expected[where])
    assert torch.equal(files.read_whole("v"), (stored["w"].float() * 0.3).bfloat16())


def test_parts_of_weights_in_4_bits_are_those_of_transformers(tmp_path: Path) -> None:
    stored = in_4_bits(torch.empty(3, 96, 10))
    save_file({f"w{end}": part for end, part in stored.items()}, tmp_path / "model.safetensors")
    files = WeightFiles(str(tmp_path))
    expected = convert_moe_packed_tensors(stored["_blocks"], stored["_scales"])
    assert files.shapes == {"w": (3, 96, 10)}
    for offsets, sizes in (((0, 0, 0), (3, 96, 10)), ((1, 31, 4), (2, 34, 1)), ((2, 64, 9), (1, 32, 1))):
        where = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        assert torch.equal(files.read("w", offsets, sizes), expected[where])
