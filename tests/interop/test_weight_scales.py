"""8-bit weights and their scales: multiplied with `dequantize`, never cast without."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dist_ckpt as dc
from dist_ckpt.core.format.index.index import FOREIGN_ATTEMPT
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import CorruptError, IncompatibleError
from dist_ckpt.interop import imports
from dist_ckpt.interop.hf.read import open_folder
from dist_ckpt.interop.readers import dequantized_state
from ranks import run_ranks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, COLUMNS = 300, 200


def codes(dtype: torch.dtype = E4M3, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> torch.Tensor:
    torch.manual_seed(7)
    values = torch.randn(shape) * 50
    return values.round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else values.to(dtype)


def factors(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(8)
    return (torch.rand(shape) / 64 + 0.001).to(dtype)


def expand(scale: torch.Tensor, blocks: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Return the scale of each element, by `repeat_interleave`, as the libraries do it."""
    for dim, (block, size) in enumerate(zip(blocks, shape, strict=True)):
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return scale


def folder(path: Path, tensors: Mapping[str, torch.Tensor], config: Any = None) -> Path:
    path.mkdir(exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


def sources(tmp_path: Path, tensors: Mapping[str, torch.Tensor], config: Any = None) -> list[Path]:
    """Write a folder of Hugging Face, its import, an import of torch.save, and a checkpoint."""
    hf = folder(tmp_path / "hf", tensors, config)
    imports.from_hf(hf, tmp_path / "imported", world_size=3)
    paths = [hf, tmp_path / "imported"]
    if config is None:
        torch.save(dict(tensors), tmp_path / "a.pt")
        imports.from_torch(tmp_path / "a.pt", tmp_path / "torch", world_size=2)
        dc.save({"model": dict(tensors)}, tmp_path / "ours")
        paths += [tmp_path / "torch", tmp_path / "ours"]
    return paths


def filled(path: Path, like: torch.Tensor, name: str = "a.weight", **options: Any) -> torch.Tensor:
    live = torch.full_like(like, 7)
    report = dc.load({"model": {name: live}}, path, **options)
    assert report.dequantized == (f"model.{name}",)
    return live


# Names of scales, with their shapes for a weight of 300 x 200 and the blocks that these mean.
FORMS: dict[str, tuple[str, tuple[int, ...], tuple[int, int]]] = {
    "deepseek": ("a.weight_scale_inv", (3, 2), (128, 128)),
    "deepseek's own": ("a.scale", (3, 2), (128, 128)),
    "rows": ("a.weight_scale", (ROWS, 1), (1, COLUMNS)),
    "flat rows": ("a.weight_scale", (ROWS,), (1, COLUMNS)),
    "groups": ("a.weight_scale", (ROWS, 5), (1, 40)),
    "columns": ("a.weight_scale", (1, COLUMNS), (ROWS, 1)),
    "tensor": ("a.weight_scale", (1,), (ROWS, COLUMNS)),
    "scalar": ("a.weight_scale", (), (ROWS, COLUMNS)),
    "comfy": ("a.scale_weight", (), (ROWS, COLUMNS)),
    "modelopt": ("a.weight_scale", (3, 1, 2, 1), (128, 128)),
    "a second name": ("a.weight_scale_2", (), (ROWS, COLUMNS)),
    "tensorrt": ("a.weights_scaling_factor", (1,), (ROWS, COLUMNS)),
    "mistral": ("a.qscale_weight", (), (ROWS, COLUMNS)),
    "short": ("a.w_scale", (ROWS, 1), (1, COLUMNS)),
    "cudnn": ("a.weight_descale", (), (ROWS, COLUMNS)),
}


@pytest.mark.parametrize(
    ("form", "dtype"), [*((f, E4M3) for f in FORMS), ("deepseek", E5M2), ("rows", torch.int8)]
)
def test_a_weight_is_the_product_of_its_elements_and_its_scale(
    tmp_path: Path, form: str, dtype: torch.dtype
) -> None:
    name, shape, blocks = FORMS[form]
    weight, scale = codes(dtype), factors(*shape)
    tensors = {"a.weight": weight, name: scale, "a.bias": torch.ones(3)}
    plain = scale.reshape([n for n in shape if n > 1] if len(shape) == 4 else shape)
    plain = plain.reshape(*plain.shape, *(1,) * (2 - plain.dim()))
    product = weight.float() * expand(plain, blocks, (ROWS, COLUMNS))
    for path in sources(tmp_path, tensors):
        for target in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            live, bias = torch.zeros(ROWS, COLUMNS, dtype=target), torch.zeros(3)
            state = {"model": {"a.weight": live, "a.bias": bias}}
            report = dc.load(state, path, dequantize=True)
            assert torch.equal(live, product.to(target))
            assert report.dequantized == ("model.a.weight",)
            assert torch.equal(bias, torch.ones(3))


def test_the_example_of_the_issue_comes_out_as_it_means(tmp_path: Path) -> None:
    weight = torch.full((2, 4), 224.0).to(E4M3)
    scale = torch.tensor([[0.01], [0.02]])
    path = folder(tmp_path / "hf", {"a.weight": weight, "a.weight_scale": scale})
    live = filled(path, torch.empty(2, 4), dequantize=True)
    assert torch.equal(live, torch.tensor([[2.24], [4.48]]).expand(2, 4))


@pytest.mark.parametrize("name", [name for name, _, _ in FORMS.values()])
@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8, torch.uint8], ids=str)
def test_no_weight_is_cast_without_its_scale(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    weight = codes(dtype, (4, 4))
    for path in sources(tmp_path, {"a.weight": weight, name: factors(4, 1)}):
        live = torch.full((4, 4), 7.0)
        for options in (
            {"strict": False},
            {"include": "model.a.weight"},
            {"exclude": f"model.{name}"},
            {"rename": {f"model.{name}": None}},
        ):
            with pytest.raises(
                IncompatibleError, match=rf"a\.weight: saved in 8 bits.*{name}.*dequanti"
            ):
                dc.load({"model": {"a.weight": live}}, path, cast=True, **options)
        with pytest.raises(IncompatibleError, match=rf"n\.w: saved in 8 bits.*{name}.*left out"):
            dc.load(
                {"n": {"w": live}},
                dc.Source(path, rename={"model.a.weight": "n.w"}),
                cast=True,
                strict=False,
            )
        with pytest.raises(IncompatibleError, match="load with dequantize=True"):
            dc.load({"model": {"a.weight": live}}, path, strict=False)
        assert torch.equal(live, torch.full((4, 4), 7.0))


RIGHT: dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {
    "of activations": (
        {"a.weight": codes(shape=(4, 4)), "a.input_scale": factors(1)},
        {"a.weight": torch.zeros(4, 4)},
    ),
    "of other activations": (
        {"a.weight": codes(shape=(4, 4)), "a.k_scale": factors(1), "a.output_scale": factors(1)},
        {"a.weight": torch.zeros(4, 4)},
    ),
    "of another tensor": (
        {"a.weight": codes(shape=(4, 4)), "a.bias_scale": factors(1), "b.weight_scale": factors(1)},
        {"a.weight": torch.zeros(4, 4)},
    ),
    "a mask beside a scale": (
        {"a.mask": torch.ones(4, dtype=torch.uint8), "a.scale": torch.ones(4)},
        {"a.mask": torch.zeros(4)},
    ),
    "a norm that is called scale": (
        {"a.scale": torch.ones(4), "a.weight": torch.ones(4)},
        {"a.weight": torch.zeros(4, dtype=torch.float64)},
    ),
    "with its scale in the state": (
        {"a.weight": codes(shape=(4, 4)), "a.weight_scale": factors(4, 1)},
        {"a.weight": torch.zeros(4, 4), "a.weight_scale": torch.zeros(4, 1)},
    ),
    "none at all": ({"a.weight": codes(shape=(4, 4))}, {"a.weight": torch.zeros(4, 4)}),
    "not cast": (
        {"a.weight": codes(shape=(4, 4)), "a.weight_scale": factors(4, 1)},
        {"a.weight": torch.zeros(4, 4).to(E4M3)},
    ),
}


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("kind", RIGHT)
def test_what_is_right_without_a_scale_is_cast_as_before(
    tmp_path: Path, kind: str, dequantize: bool
) -> None:
    saved, live = RIGHT[kind]
    for path in sources(tmp_path, saved):
        state = {name: torch.zeros_like(value) for name, value in live.items()}
        report = dc.load({"model": state}, path, cast=True, strict=False, dequantize=dequantize)
        assert report.dequantized == ()
        for name, value in state.items():
            assert torch.equal(value, saved[name].to(value.dtype)), name


def test_new_tensors_are_float32_and_have_no_scale_beside_them(tmp_path: Path) -> None:
    weight, scale = codes(), factors(3, 2)
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale, "a.input_scale": factors(1)}
    for path in sources(tmp_path, tensors):
        state: dict[str, Any] = {}
        report = dc.load(state, path, dequantize=True)
        assert state["model"].keys() == {"a.weight"}
        product = weight.float() * expand(scale, (128, 128), (ROWS, COLUMNS))
        assert torch.equal(state["model"]["a.weight"], product)
        assert {*report.dropped} == {"model.a.weight_scale_inv", "model.a.input_scale"}
        plain: dict[str, Any] = {}
        dc.load(plain, path)
        assert plain["model"].keys() == tensors.keys()
        assert torch.equal(plain["model"]["a.weight"].view(torch.uint8), weight.view(torch.uint8))


# --- blocks ------------------------------------------------------------------------------------

CONFIGS: dict[str, tuple[Any, tuple[int, ...], tuple[int, int]]] = {
    "transformers": ({"quant_method": "fp8", "weight_block_size": [64, 100]}, (5, 2), (64, 100)),
    "uneven": ({"weight_block_size": [70, 90]}, (5, 3), (70, 90)),
    "compressed-tensors": (
        {"config_groups": {"group_0": {"weights": {"strategy": "group", "group_size": 96}}}},
        (ROWS, 3),
        (1, 96),
    ),
    "blocks of compressed-tensors": (
        {"config_groups": {"group_0": {"weights": {"block_structure": [60, 64]}}}},
        (5, 4),
        (60, 64),
    ),
    "as text": (
        {"config_groups": {"group_0": {"weights": {"block_structure": "60x64"}}}},
        (5, 4),
        (60, 64),
    ),
    "two groups": (
        {
            "config_groups": {
                "group_0": {"weights": {"strategy": "group", "group_size": 64}},
                "group_1": {"weights": {"block_structure": [128, 128]}},
            }
        },
        (3, 2),
        (128, 128),
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_files_state_the_sizes_of_blocks(tmp_path: Path, kind: str) -> None:
    config, shape, blocks = CONFIGS[kind]
    weight, scale = codes(), factors(*shape)
    name = "a.weight_scale_inv" if kind == "transformers" else "a.weight_scale"
    product = weight.float() * expand(scale, blocks, (ROWS, COLUMNS))
    for path in sources(tmp_path, {"a.weight": weight, name: scale}, config):
        assert torch.equal(filled(path, product, dequantize=True), product)


@pytest.mark.parametrize(
    ("shape", "config", "message"),
    [
        ((5, 4), None, "no quantization_config states"),
        ((3, 2), {"weight_block_size": [64, 64]}, r"not that of blocks of \(64, 64\)"),
        ((ROWS, 3), None, "no quantization_config states"),  # 3 groups of 200
        ((ROWS, 2), None, "no quantization_config states"),  # 128 and 72, or 100 and 100
        ((COLUMNS,), None, "no quantization_config states"),  # 200 of 300 rows
        ((3,), None, "no quantization_config states"),  # fused q, k and v of unequal sizes
        ((400, 1), None, r"its scale model\.a\.weight_scale \[400, 1\]"),
        ((2, 3, 2), None, r"its scale model\.a\.weight_scale \[2, 3, 2\]"),
    ],
)
def test_a_scale_that_does_not_fit_is_refused(
    tmp_path: Path, shape: tuple[int, ...], config: Any, message: str
) -> None:
    path = folder(tmp_path, {"a.weight": codes(), "a.weight_scale": factors(*shape)}, config)
    live = torch.full((ROWS, COLUMNS), 7.0)
    with pytest.raises(IncompatibleError, match=message):
        dc.load({"model": {"a.weight": live}}, path, dequantize=True)
    assert torch.equal(live, torch.full((ROWS, COLUMNS), 7.0))


@pytest.mark.parametrize(
    "name", ["weight_inv_scale", "weight.inverse_scale", "weight_scale_reciprocal"]
)
def test_a_scale_that_may_be_a_divisor_is_refused(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path, {"a.weight": codes(), f"a.{name}": factors()})
    live = torch.full((ROWS, COLUMNS), 7.0)
    for options in ({"dequantize": True}, {"cast": True, "strict": False}):
        with pytest.raises(IncompatibleError, match=r"a\.weight"):
            dc.load({"model": {"a.weight": live}}, path, **options)  # type: ignore[arg-type]
    with pytest.raises(IncompatibleError, match="a scale that may be a factor or a divisor"):
        dc.load({"model": {"a.weight": live}}, path, dequantize=True)
    assert torch.equal(live, torch.full((ROWS, COLUMNS), 7.0))


@pytest.mark.parametrize("experts", [(3, 300, 200), (2, 3, 100, 130)])
def test_stacked_experts_have_the_blocks_of_their_last_dimensions(
    tmp_path: Path, experts: tuple[int, ...]
) -> None:
    blocks = (*(1 for _ in experts[2:]), 128, 128)
    shape = tuple(-(-n // b) for n, b in zip(experts, blocks, strict=True))
    weight, scale = codes(shape=experts), factors(*shape)
    path = folder(tmp_path, {"gate_up_proj": weight, "gate_up_proj_scale_inv": scale})
    product = weight.float() * expand(scale, blocks, experts)
    assert torch.equal(filled(path, product, "gate_up_proj", dequantize=True), product)


# --- imports -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("form", ["deepseek", "groups", "flat rows", "scalar"])
def test_an_import_multiplies_weights_by_their_scales(
    tmp_path: Path, form: str, world_size: int
) -> None:
    name, shape, blocks = FORMS[form]
    weight, scale = codes(), factors(*shape)
    tensors = {"a.weight": weight, name: scale, "a.input_scale": factors(1), "a.bias": factors(3)}
    plain = scale.reshape(*shape, *(1,) * (2 - len(shape)))
    product = weight.float() * expand(plain, blocks, (ROWS, COLUMNS))
    hf = folder(tmp_path / "hf", tensors)
    torch.save(tensors, tmp_path / "a.pt")
    torch.save({**tensors, "a.weight": weight.t().contiguous().t()}, tmp_path / "strided.pt")
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(dict(tensors), checkpoint_id=tmp_path / "dcp")
    options: Any = {"world_size": world_size, "dequantize": True}
    imports.from_hf(hf, tmp_path / "1", **options)
    imports.from_torch(tmp_path / "a.pt", tmp_path / "2", **options)
    imports.from_torch(tmp_path / "strided.pt", tmp_path / "3", **options)
    imports.from_dcp(tmp_path / "dcp", tmp_path / "4", **options)
    for number in range(1, 5):
        assert dc.verify(tmp_path / f"{number}").ok
        state: dict[str, Any] = {}
        dc.load(state, tmp_path / f"{number}")
        found = state.get("model", state)
        found = {**found, **found.pop("a", {})} if "a" in found else found
        assert {n.removeprefix("a.") for n in found} == {"weight", "bias"}
        assert torch.equal({n.removeprefix("a."): t for n, t in found.items()}["weight"], product)


def test_weights_that_share_a_scale_have_it_under_each_name(tmp_path: Path) -> None:
    weight, scale = codes(shape=(4, 5)), factors(1)
    tensors = {f"{name}.weight": weight.clone() for name in "ab"}
    tensors |= dict.fromkeys(("a.weight_scale", "b.weight_scale"), scale)
    dc.save({"model": tensors}, tmp_path / "ours")
    torch.save(tensors, tmp_path / "a.pt")
    imports.from_torch(tmp_path / "a.pt", tmp_path / "b", dequantize=True)
    state: dict[str, Any] = {}
    dc.load(state, tmp_path / "b")
    assert state["model"].keys() == {"a.weight", "b.weight"}
    live = {name: torch.zeros(4, 5) for name in ("a.weight", "b.weight")}
    dc.load({"model": live}, tmp_path / "ours", dequantize=True)
    for found in (live, state["model"]):
        assert all(torch.equal(value, weight.float() * scale) for value in found.values())
    part = {"model": {"b.weight": torch.zeros(4, 5)}}
    with pytest.raises(IncompatibleError, match="which is left out"):
        dc.load(part, tmp_path / "ours", cast=True, strict=False)


def test_any_bytes_of_products_can_be_read(tmp_path: Path) -> None:
    weight, scale = codes(shape=(4, 5)), factors(4, 1)
    folder(tmp_path, {"w.weight": weight, "w.weight_scale": scale})
    convert = partial(dequantized_state.dequantize, LocalStorage(), lambda _: True)
    files = open_folder(LocalStorage(), str(tmp_path), ["model.safetensors"], convert)
    assert files is not None
    names = [entry.name for entry in files.list(f"{tmp_path}/{FOREIGN_ATTEMPT}")]
    (name,) = (name for name in names if name.endswith(".safetensors"))
    with closing(files.open(f"{tmp_path}/{FOREIGN_ATTEMPT}/{name}")) as file:
        whole = memoryview(bytearray(file.nbytes))
        assert file.read_into(0, whole) == file.nbytes
        product = (weight.float() * scale).numpy().tobytes()
        assert bytes(whole[-len(product) :]) == product
        for first in range(file.nbytes - len(product) - 3, file.nbytes, 7):
            part = memoryview(bytearray(6))
            assert part[: file.read_into(first, part)] == whole[first : first + 6]


def test_an_import_takes_the_sizes_of_blocks_from_the_config(tmp_path: Path) -> None:
    config, shape, blocks = CONFIGS["uneven"]
    weight, scale = codes(), factors(*shape)
    hf = folder(tmp_path / "hf", {"a.weight": weight, "a.weight_scale_inv": scale}, config)
    imports.from_hf(hf, tmp_path / "ours", dequantize=True, world_size=4)
    live = torch.zeros(ROWS, COLUMNS)
    dc.load({"model": {"a.weight": live}}, tmp_path / "ours")
    assert torch.equal(live, weight.float() * expand(scale, blocks, (ROWS, COLUMNS)))
    with dc.open(tmp_path / "ours") as found:
        assert "quantization_config" not in found.metadata


def test_an_import_checks_what_it_multiplies(tmp_path: Path) -> None:
    weight = codes(shape=(64, 64))
    torch.save({"a.weight": weight, "a.weight_scale": factors(1)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(weight.view(torch.uint8).numpy().tobytes()) + 5] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CorruptError, match="has the CRC-32"):
        imports.from_torch(tmp_path / "a.pt", tmp_path / "ours", dequantize=True)


def test_an_import_refuses_what_it_cannot_dequantize(tmp_path: Path) -> None:
    tensors = {**PACKED["NVFP4"](), "b.weight": torch.ones(2)}
    hf = folder(tmp_path / "hf", tensors)
    with pytest.raises(IncompatibleError, match=r"model\.a\.weight is packed in the form of NVFP4"):
        imports.from_hf(hf, tmp_path / "ours", dequantize=True)
    assert not (tmp_path / "ours").exists()
    imports.from_hf(hf, tmp_path / "ours", dequantize=True, exclude="model.a")
    with dc.open(tmp_path / "ours") as found:
        assert [*found.tensors] == ["model.b.weight"]
    imports.from_hf(hf, tmp_path / "raw")
    with dc.open(tmp_path / "raw") as found:
        assert len(found.tensors) == len(tensors)


# --- dtypes of scales --------------------------------------------------------------------------


def test_exponents_are_powers_of_two(tmp_path: Path) -> None:
    exponents = torch.tensor([[127, 120], [0, 254], [140, 1]], dtype=torch.uint8)
    powers = torch.ldexp(torch.ones(3, 2).double(), exponents.int() - 127)
    weight = codes(shape=(3, 64))
    config = {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
    product = (weight.double() * expand(powers, (1, 32), (3, 64))).float()
    finite = product.isfinite()
    for number, scale in enumerate((exponents, exponents.view(torch.float8_e8m0fnu))):
        tensors = {"a.weight": weight, "a.weight_scale": scale}
        path = folder(tmp_path / f"{number}", tensors, config)
        live = torch.zeros(3, 64)
        if not finite.all():
            with pytest.raises(IncompatibleError, match="too large"):
                dc.load({"model": {"a.weight": live}}, path, dequantize=True)
        assert torch.equal(live[finite], product[finite])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_scale_of_another_dtype_is_that_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    weight, scale = codes(), factors(ROWS, 1, dtype=dtype)
    path = folder(tmp_path, {"a.weight": weight, "a.weight_scale": scale})
    product = weight.float() * scale.float()
    assert torch.equal(filled(path, product, dequantize=True), product)


def test_a_product_that_is_too_large_is_an_error(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.full((2, 2), 400.0).to(E4M3), "a.weight_scale": torch.tensor(1e3)}
    path = folder(tmp_path, tensors)
    with pytest.raises(IncompatibleError, match=r"a\.weight: saved values are too large"):
        dc.load({"model": {"a.weight": torch.zeros(2, 2).half()}}, path, dequantize=True)
    live = torch.zeros(2, 2)
    dc.load({"model": {"a.weight": live}}, path, dequantize=True)
    assert torch.equal(live, tensors["a.weight"].float() * 1e3)


# --- other memory ------------------------------------------------------------------------------


def test_strided_tied_and_meta_tensors_are_multiplied_once(tmp_path: Path) -> None:
    weight, scale = codes(), factors(3, 2)
    path = folder(tmp_path / "hf", {"weight": weight, "weight_scale_inv": scale})
    product = weight.float() * expand(scale, (128, 128), (ROWS, COLUMNS))
    strided = torch.zeros(COLUMNS, ROWS).t()
    assert torch.equal(dequantized(path, strided), product)
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        dc.load({"model": model}, path, dequantize=True)
        assert torch.equal(model.weight, product)
    first = torch.zeros(ROWS, COLUMNS)
    imports.from_hf(path, tmp_path / "ours")
    saved = {"a": {"weight": weight, "weight_scale": factors(1)}}
    dc.save({**saved, "b": saved["a"]}, tmp_path / "tied")
    state = {"a": {"weight": first}, "b": {"weight": first}}
    dc.load(state, tmp_path / "tied", dequantize=True)
    assert torch.equal(first, weight.float() * factors(1))


def dequantized(path: Path, live: torch.Tensor) -> torch.Tensor:
    dc.load({"model": {"weight": live}}, path, dequantize=True)
    return live


def test_two_sources_have_their_own_scales(tmp_path: Path) -> None:
    weight = codes()
    paths = [
        folder(tmp_path / name, {"weight": weight, "weight_scale": factors(1) * k})
        for name, k in (("a", 1), ("b", 3))
    ]
    state = {
        "a": {"weight": torch.zeros(ROWS, COLUMNS)},
        "b": {"weight": torch.zeros(ROWS, COLUMNS)},
    }
    rules = [
        dc.Source(path, rename={"model.*": f"{key}.*"})
        for path, key in zip(paths, "ab", strict=True)
    ]
    dc.load(state, {"a": rules[0], "b": rules[1]}, dequantize=True)
    for key, k in (("a", 1), ("b", 3)):
        assert torch.equal(state[key]["weight"], weight.float() * (factors(1) * k))


def test_a_rename_that_stacks_weights_does_not_lose_their_scales(tmp_path: Path) -> None:
    path = folder(
        tmp_path / "hf",
        {f"{n}.w.{name}": value.clone() for n in "01" for name, value in EXPERT.items()},
    )
    rename = {"model.{n}.w.weight": [dc.Stack("n"), "model.w"]}
    live = {"w": torch.full((2, 4, 4), 7.0)}
    for dequantize in (False, True):
        with pytest.raises(IncompatibleError, match=r"0\.w\.weight_scale.*|0\.w\.weight, .*scales"):
            dc.load(
                {"model": live}, path, rename=rename, cast=True, strict=False, dequantize=dequantize
            )
    assert torch.equal(live["w"], torch.full((2, 4, 4), 7.0))


EXPERT = {"weight": codes(shape=(4, 4)), "weight_scale": factors(4, 1)}


class Strict(torch.nn.Linear):
    """A module that gets its values by a `load_state_dict` of its own."""

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return super().load_state_dict(*args, **options)


def test_a_scale_that_an_operation_moves_is_loaded(tmp_path: Path) -> None:
    weight, scale = codes(shape=(4, 3)), factors(4, 1)
    dc.save({"a.weight": weight, "a.weight_scale": scale}, tmp_path / "ck")
    live = {"a.weight": torch.zeros(4, 3), "s": torch.zeros(1, 4)}
    dc.load(live, tmp_path / "ck", cast=True, rename={"a.weight_scale": [dc.Transpose(), "s"]})
    assert torch.equal(live["a.weight"], weight.float())
    assert torch.equal(live["s"], scale.T)


def test_a_state_that_asks_for_the_scale_gets_both_as_saved(tmp_path: Path) -> None:
    saved = {"a.weight": codes(shape=(4, 3)), "a.weight_scale": factors(4, 1)}
    dc.save(saved, tmp_path / "ck")
    live: dict[str, Any] = dict.fromkeys(saved)
    dc.load(live, tmp_path / "ck", dequantize=True)
    for name, tensor in saved.items():
        assert live[name].dtype == tensor.dtype
        assert torch.equal(live[name].view(torch.uint8), tensor.view(torch.uint8))


class Eight(torch.nn.Module):
    """A module of the second version, with a weight of 8 bits."""

    _version = 2

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state, prefix, *args)


class OldEight(Eight):
    _version = 1


def test_products_are_no_integers_of_a_module_that_converts(tmp_path: Path) -> None:
    old = OldEight(E4M3)
    old.register_buffer("weight_scale", factors(4, 1))
    dc.save({"model": old}, tmp_path / "ck")
    with pytest.raises(IncompatibleError, match=r"saved as float8_e4m3fn, the state has int8"):
        dc.load({"model": Eight(torch.int8)}, tmp_path / "ck", dequantize=True)


def test_a_module_with_its_own_load_gets_the_products(tmp_path: Path) -> None:
    weight, scale = codes(), factors(3, 2)
    path = folder(tmp_path, {"weight": weight, "weight_scale_inv": scale})
    product = weight.float() * expand(scale, (128, 128), (ROWS, COLUMNS))
    for cls in (Strict, torch.nn.Linear):
        model = cls(COLUMNS, ROWS, bias=False)
        before = model.weight.detach().clone()
        with pytest.raises(IncompatibleError, match="which is left out"):
            dc.load({"model": model}, path, strict=False, cast=True)
        assert torch.equal(model.weight, before)
        dc.load({"model": model}, path, dequantize=True)
        assert torch.equal(model.weight, product)


def load_sharded(rank: int, path: str) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS, bias=False)).bfloat16()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    dc.load({"model": model}, path, dequantize=True)
    rules = dc.ShardingConfig({"tp": 2}, {"0.weight": {"tp": 1}})
    part = torch.zeros(ROWS, COLUMNS // 2)
    dc.load({"model": {"0.weight": part}}, path, sharding=rules, dequantize=True)
    scale = factors(3, 2)
    product = codes().float() * expand(scale, (128, 128), (ROWS, COLUMNS))
    whole: Any = model[0].weight
    half = product[:, rank * COLUMNS // 2 : (rank + 1) * COLUMNS // 2]
    return torch.equal(whole.full_tensor(), product.bfloat16()) and torch.equal(part, half)


@pytest.mark.multi_process
def test_ranks_multiply_their_parts(tmp_path: Path) -> None:
    weight, scale = codes(), factors(3, 2)
    path = folder(tmp_path, {"0.weight": weight, "0.weight_scale_inv": scale})
    assert run_ranks(load_sharded, str(path), world_size=2) == [True, True]


# --- packed weights ----------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [{}, {"cast": True}, {"strict": False}, {"dequantize": True}]

U8, I32 = torch.uint8, torch.int32
PACKED: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "NVFP4": lambda: {
        "a.weight": torch.ones(4, 16, dtype=U8),
        "a.weight_scale": torch.ones(4, 2).to(E4M3),
        "a.weight_scale_2": torch.ones(()),
        "a.input_scale": torch.ones(()),
    },
    "compressed-tensors": lambda: {
        "a.weight_packed": torch.ones(4, 4, dtype=I32),
        "a.weight_scale": torch.ones(4, 1),
        "a.weight_shape": torch.tensor([4, 32]),
    },
    "MXFP4": lambda: {
        "a.weight_blocks": torch.ones(4, 1, 16, dtype=U8),
        "a.weight_scales": torch.ones(4, 1, dtype=U8),
    },
    "GPTQ or AWQ": lambda: {
        "a.qweight": torch.ones(4, 4, dtype=I32),
        "a.qzeros": torch.ones(1, 1, dtype=I32),
        "a.scales": torch.ones(1, 4).half(),
        "a.g_idx": torch.zeros(32, dtype=I32),
    },
    "bitsandbytes": lambda: {
        "a.weight": torch.ones(64, 1, dtype=U8),
        "a.weight.absmax": torch.ones(2),
        "a.weight.quant_map": torch.ones(16),
        "a.weight.quant_state.bitsandbytes__nf4": torch.ones(8, dtype=U8),
    },
    "torchao": lambda: {
        "a._weight_qdata": torch.ones(4, 32, dtype=torch.int8),
        "a._weight_scale": torch.ones(4, 1),
    },
    "quanto": lambda: {
        "a.weight._data": torch.ones(4, 32, dtype=torch.int8),
        "a.weight._scale": torch.ones(4, 1),
    },
    "HQQ": lambda: {"a.W_q": torch.ones(4, 16, dtype=U8), "a.scale": torch.ones(4, 1)},
}


@pytest.mark.parametrize("form", PACKED)
def test_packed_weights_are_refused_by_name(tmp_path: Path, form: str) -> None:
    for path in sources(tmp_path, PACKED[form]()):
        live = torch.full((4, 32), 7.0)
        for options in OPTIONS:
            with pytest.raises(IncompatibleError, match=form):
                dc.load({"model": {"a.weight": live}}, path, **options)
        with pytest.raises(IncompatibleError, match=form):
            dc.load({}, path, dequantize=True)
        assert torch.equal(live, torch.full((4, 32), 7.0))
        dc.load({"model": {"a.weight": live}}, path, strict=False, exclude="model.a.weight")
        plain: dict[str, Any] = {}
        dc.load(plain, path)  # as they are
        assert plain["model"].keys() == PACKED[form]().keys()


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"a.weight_zero_point": torch.zeros(4, 1, dtype=torch.int8)}, "weight_zero_point next to"),
        ({"a.weight_g_idx": torch.zeros(4, dtype=I32)}, "weight_g_idx next to its scale"),
        ({"a.weight_scale_2": torch.ones(())}, "has 2 scales: model.a.weight_scale, model"),
        ({"a.SCB": torch.ones(4)}, "bitsandbytes"),
        ({"a.pre_quant_scale": torch.ones(4)}, "pre_quant_scale next to its scale"),
        ({"a.smooth_scale": torch.ones(4)}, "smooth_scale next to its scale"),
    ],
)
def test_what_is_more_than_a_scale_is_refused(
    tmp_path: Path, beside: dict[str, torch.Tensor], message: str
) -> None:
    tensors = {"a.weight": codes(torch.int8, (4, 4)), "a.weight_scale": factors(4, 1), **beside}
    path = folder(tmp_path, tensors)
    with pytest.raises(IncompatibleError, match=message):
        dc.load({"model": {"a.weight": torch.zeros(4, 4)}}, path, dequantize=True, strict=False)


@pytest.mark.parametrize("options", [{"cast": True}, {"dequantize": True}], ids=str)
def test_a_scale_that_may_include_activations_is_not_applied(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    tensors = {"a.weight": codes(torch.int8, (4, 4)), "a.dequant_scale": factors(4, 1)}
    path, live = folder(tmp_path, tensors), torch.full((4, 4), 7.0)
    with pytest.raises(IncompatibleError, match=r"a\.dequant_scale"):
        dc.load({"model": {"a.weight": live}}, path, strict=False, **options)
    assert torch.equal(live, torch.full((4, 4), 7.0))


def test_bytes_without_a_meaning_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path, {"a.weight": codes(U8, (4, 4)), "a.weight_scale": factors(4, 1)})
    with pytest.raises(IncompatibleError, match=r"a\.weight is uint8 with a scale of float32"):
        dc.load({"model": {"a.weight": torch.zeros(4, 4)}}, path, dequantize=True)
