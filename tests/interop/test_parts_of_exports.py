"""Parts of a checkpoint in exports for torch.load and DCP: what is chosen, named, or refused."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import dist_ckpt as dc
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.interop.dcp import export as dcp_export
from dist_ckpt.interop.dcp.adapter import StorageReader, StorageWriter
from dist_ckpt.interop.dcp.export import export_folder
from dist_ckpt.interop.hf import export as hf
from dist_ckpt.interop.shrew import files
from dist_ckpt.interop.torch_save import export as torch_export
from fork_server import forked_python
from subclass_tensors import Quantized

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

load = torch.load

# Of a way out: what exports, and what says what that would.
Export = Callable[..., Any]
BOTH: list[tuple[Export, Export]] = [
    (torch_export.export_file, torch_export.plan_export_file),
    (dcp_export.export_folder, dcp_export.plan_export),
]


def trained(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def exported(source: Path, **options: Any) -> Any:
    torch_export.export_file(source, source.with_suffix(".pt"), overwrite=True, **options)
    return load(source.with_suffix(".pt"), weights_only=True)


# --- what is chosen --------------------------------------------------------------------------


def test_what_lies_below_a_name_is_exported_alone(tmp_path: Path) -> None:
    model, optimizer = trained()
    wrapped = torch.nn.ModuleDict({"inner": model})
    dc.save({"model": wrapped, "optim": optimizer, "epoch": 3}, tmp_path / "ck")
    model.load_state_dict(exported(tmp_path / "ck", only="model.inner"))
    assert exported(tmp_path / "ck", only="epoch") == 3
    for only in ("inner", "model.in"):
        with pytest.raises(IncompatibleError, match=rf"no '{only}': .* of model, optim, epoch"):
            exported(tmp_path / "ck", only=only)


def test_the_groups_of_an_optimizer_stay_as_long_as_anything_of_it(tmp_path: Path) -> None:
    model, optimizer = trained(lr=torch.tensor(0.5))
    dc.save({"model": model, "optim": optimizer, "n": 1}, tmp_path / "ck")
    found = exported(tmp_path / "ck", include="*1.weight*")
    assert [*found["model"], *found["optim"]["state"]] == ["1.weight", "1.weight"]
    (group,) = found["optim"]["param_groups"]
    assert group["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert "lr" not in group  # a tensor, which can be left out
    found = exported(tmp_path / "ck", include="optim.param_groups.0.lr")
    assert found["optim"]["param_groups"][0]["lr"] == 0.5
    assert [*exported(tmp_path / "ck", exclude="optim")] == ["model", "n"]

    dcp_export.export_folder(tmp_path / "ck", tmp_path / "dcp", include="*1.weight*")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "b.pt")
    (group,) = load(tmp_path / "b.pt")["optim"]["param_groups"]
    assert group["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("calls", BOTH)
def test_a_list_out_of_whose_midst_something_is_left_out_is_refused(
    calls: tuple[Export, Export], kind: Callable[[Any], object], tmp_path: Path
) -> None:
    dc.save({"l": kind(torch.full((1,), float(n)) for n in range(3))}, tmp_path / "ck")
    for call in calls:
        for options in ({"exclude": "l.0"}, {"exclude": "l.1"}, {"include": ["l.0", "l.2"]}):
            with pytest.raises(IncompatibleError, match=r"l is a .*left out"):
                call(tmp_path / "ck", tmp_path / "to", **options)
    calls[0](tmp_path / "ck", tmp_path / "to", exclude="l.2")
    if os.path.isdir(tmp_path / "to"):
        dcp_to_torch_save(tmp_path / "to", tmp_path / "to.pt")
    else:
        os.rename(tmp_path / "to", tmp_path / "to.pt")
    assert [*load(tmp_path / "to.pt")["l"]] == [0.0, 1.0]


@pytest.mark.parametrize("calls", BOTH)
def test_what_each_rank_has_its_own_of_is_refused_and_can_be_left_out(
    calls: tuple[Export, Export], tmp_path: Path
) -> None:
    state = {"w": torch.ones(1), "rng": dc.RNG(), "data": dc.PerRank({"at": 3})}
    dc.save(state, tmp_path / "ck")
    for call in calls:
        with pytest.raises(IncompatibleError, match=r"rng .*--exclude rng.*--exclude data"):
            call(tmp_path / "ck", tmp_path / "to")
    calls[0](tmp_path / "ck", tmp_path / "to", exclude=["rng", "data"])
    assert (tmp_path / "to").exists()


@pytest.mark.parametrize("options", [{}, {"exclude": "n"}])
@pytest.mark.parametrize("calls", BOTH)
def test_what_is_empty_in_a_list_is_not_left_out(
    calls: tuple[Export, Export], options: dict[str, str], tmp_path: Path
) -> None:
    dc.save({"l": [{}, torch.ones(1), {"a": {}}, torch.ones(2)], "n": 1}, tmp_path / "ck")
    for call in reversed(calls):
        call(tmp_path / "ck", tmp_path / "to", **options)
    assert (tmp_path / "to").exists()


@pytest.mark.parametrize("calls", BOTH)
def test_patterns_that_leave_nothing_are_refused(
    calls: tuple[Export, Export], tmp_path: Path
) -> None:
    dc.save({"a": torch.ones(1), "b": 1}, tmp_path / "ck")
    for call in calls:
        for options in ({"exclude": "*"}, {"include": "a", "exclude": "a"}):
            with pytest.raises(ValueError, match="leaves nothing: give other patterns"):
                call(tmp_path / "ck", tmp_path / "to", **options)
    assert [one.name for one in tmp_path.iterdir()] == ["ck"]


def test_a_pattern_that_lacks_the_component_is_told_what_would_match(tmp_path: Path) -> None:
    dc.save({"model": {"a.w": torch.ones(1)}, "n": 1}, tmp_path / "ck")
    for export in (torch_export.export_file, hf.export_folder, dcp_export.export_folder):
        with pytest.raises(ValueError, match=r"'a\.\*' matches no name, but 'model\.a\.\*' does"):
            export(tmp_path / "ck", tmp_path / "to", include="a.*")
    with pytest.raises(ValueError, match=r"'b' matches no name: correct or remove it"):
        exported(tmp_path / "ck", exclude="b")
    dc.save({"m*": {"w": torch.ones(1)}}, tmp_path / "odd")
    with pytest.raises(ValueError, match=r"but 'm\[\*\]\.w' does"):
        exported(tmp_path / "odd", exclude="w")


def test_patterns_may_be_about_what_lies_outside_of_the_component(tmp_path: Path) -> None:
    dc.save({"model": {"w": torch.ones(1)}, "ema": {"w": torch.ones(1)}}, tmp_path / "ck")
    hf.export_folder(tmp_path / "ck", tmp_path / "hf", only="model", exclude="ema")
    assert [*exported(tmp_path / "ck", only="model", exclude="ema")] == ["w"]


# --- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "only"),
    [
        (("train", "net", "opt"), "train.net"),
        (("all", "my.model", "opt"), "all.my.model"),
        (("", "model", "opt"), "model"),
    ],
)
def test_parameters_have_the_names_that_they_have_in_their_model(
    names: tuple[str, str, str], only: str, tmp_path: Path
) -> None:
    above, net, opt = names
    model, optimizer = trained()
    state: Any = {net: model, opt: optimizer}
    dc.save({above: state} if above else state, tmp_path / "ck")
    found = exported(tmp_path / "ck")
    found = (found[above] if above else found)[opt]
    assert [*found["state"]] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [*exported(tmp_path / "ck", only=only)] == [*found["state"]]
    fresh = trained()
    set_optimizer_state_dict(*fresh, found)
    assert str(fresh[1].state_dict()) == str(optimizer.state_dict())


def test_two_names_that_dcp_takes_for_one_are_refused(tmp_path: Path) -> None:
    dc.save({"a.b": torch.ones(1), "a": {"b": 1}}, tmp_path / "ck")
    with pytest.raises(IncompatibleError, match=r"two names would have the key 'a\.b'"):
        dcp_export.export_folder(tmp_path / "ck", tmp_path / "to")
    with pytest.raises(CheckpointException, match=r"two names would have the key 'a\.b'"):
        dcp.load({"a.b": torch.zeros(1)}, storage_reader=StorageReader(tmp_path / "ck"))
    assert exported(tmp_path / "ck") == {"a.b": torch.ones(1), "a": {"b": 1}}


def test_what_looks_like_the_groups_of_an_optimizer_and_is_none_stays_as_it_is(
    tmp_path: Path,
) -> None:
    state = {"x": {"lr": 5}, "x.params": ["a"], "y": 5, "y.params": ["b"]}
    dc.save({**state, "w": torch.ones(1)}, tmp_path / "ck")
    loaded: dict[str, object] = {}
    dc.load(loaded, tmp_path / "ck")
    for found in (loaded, exported(tmp_path / "ck")):
        assert {name: found[name] for name in state} == state


# --- what has no place -----------------------------------------------------------------------


@pytest.mark.parametrize("calls", BOTH)
def test_integers_of_less_than_a_byte_are_refused_by_name(
    calls: tuple[Export, Export], tmp_path: Path
) -> None:
    if not hasattr(torch, "uint4"):
        pytest.skip("this torch has none")
    small = torch.zeros(2, dtype=torch.uint8).view(torch.uint4)
    dc.save({"model": {"w[0]": small, "v": torch.ones(1)}}, tmp_path / "ck")
    for call in calls:
        with pytest.raises(IncompatibleError, match=r"w\[0\] is uint4, which torch") as raised:
            call(tmp_path / "ck", tmp_path / "to")
        # As the message says: a bracket is no pattern there.
        assert "exclude='model.w[[]0]', on the command line --exclude 'model." in str(raised.value)
    calls[0](tmp_path / "ck", tmp_path / "to", exclude="model.w[[]0]")


def test_a_folder_need_not_be_of_utf_8(tmp_path: Path) -> None:
    os.mkdir(folder := os.fsencode(tmp_path) + b"/\xff")
    dc.save({"w": torch.ones(1)}, tmp_path / "ck")
    torch_export.export_file(tmp_path / "ck", os.fsdecode(folder) + "/a.pt")
    assert load(os.fsdecode(folder) + "/a.pt") == {"w": torch.ones(1)}


def test_integers_that_torch_load_takes_with_weights_only_alone_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fine = {"a": 2**2039 - 1, "b": 1 - 2**2039, "c": Counter("abc")}
    dc.save(fine, tmp_path / "ck")
    with caplog.at_level(logging.WARNING, "dist_ckpt"):
        assert exported(tmp_path / "ck") == fine
    assert not caplog.text
    dc.save({"big": 2**2040, "less": -(2**2040)}, tmp_path / "ck2")
    torch_export.export_file(tmp_path / "ck2", tmp_path / "b.pt")
    assert "needs weights_only=False for big, less" in caplog.text


def test_a_file_takes_no_name_of_another_format_and_no_place_of_its_source(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1), "v": torch.ones(1)}, one := tmp_path / "one.safetensors")
    before = one.read_bytes()
    with pytest.raises(ValueError, match="choose another name"):
        torch_export.export_file(one, tmp_path / "two.safetensors")
    os.rename(one, one := tmp_path / "one.st.safetensors")
    (tmp_path / "a.pt").symlink_to(one)
    for target in (one, tmp_path / "a.pt"):
        with pytest.raises((ValueError, dc.ExistsError), match="another"):
            files.export_file(one, target, overwrite=True)
        with pytest.raises((ValueError, dc.ExistsError), match="another"):
            torch_export.export_file(one, target, include="model.w", overwrite=True)
    assert one.read_bytes() == before


def test_each_tensor_that_is_loaded_has_hooks_of_its_own(tmp_path: Path) -> None:
    dc.save({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2, 0, 3)}, tmp_path / "ck")
    found = exported(tmp_path / "ck")
    assert found["a"]._backward_hooks is not found["b"]._backward_hooks
    assert found["c"].stride() == torch.ones(2, 0, 3).stride()


def test_tensors_made_of_others_are_refused_below_dcp_with_what_takes_them(tmp_path: Path) -> None:
    state = {"w": Quantized.of(torch.ones(4, 4)), "v": torch.ones(1)}
    with pytest.raises(
        CheckpointException, match=r"w: .*Quantized is made of other .* with dc\.save"
    ):
        dcp.save(state, storage_writer=StorageWriter(tmp_path / "a"))
    dc.save(state, tmp_path / "ck")
    for export, plan_export in BOTH:
        for call in (export, plan_export):
            with pytest.raises(IncompatibleError, match=r"w is a quantized tensor.*exclude='w'"):
                call(tmp_path / "ck", tmp_path / "to")
    export_folder(tmp_path / "ck", tmp_path / "dcp", exclude="w")
    assert exported(tmp_path / "ck", exclude="w") == {"v": torch.ones(1)}


# --- memory ----------------------------------------------------------------------------------

# See `LIMITED` in test_hf.py.
LIMITED = """
import resource, sys, threading
threading.stack_size(256 << 10)
from dist_ckpt.interop.dcp import export as dcp_export
from dist_ckpt.interop.torch_save import export as torch_export
used = next(int(line.split()[1]) for line in open("/proc/self/status") if "VmData" in line)
limit = (used << 10) + int(sys.argv[4])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
getattr(globals()[sys.argv[1]], sys.argv[2])(sys.argv[3], sys.argv[3] + ".out")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize(
    ("module", "function", "nbytes"),
    [("torch_export", "export_file", 96 << 20), ("dcp_export", "export_folder", 200 << 20)],
)
def test_exports_need_far_less_memory_than_the_tensors_take(
    module: str, function: str, nbytes: int, tmp_path: Path
) -> None:
    one = torch.arange(40 << 20)  # 320 MiB
    dc.save({"w": one}, tmp_path / "ck")
    command = [forked_python(), "-c", LIMITED, module, function, f"{tmp_path}/ck", f"{nbytes}"]
    environ = {**os.environ, "DIST_CKPT_THREADS": "2"}
    subprocess.run(command, check=True, timeout=120, env=environ)
    out = tmp_path / "ck.out"
    if out.is_dir():
        found = {"w": torch.zeros_like(one)}
        dcp.load(found, checkpoint_id=out)
    else:
        found = load(out, mmap=True)
    assert torch.equal(found["w"], one)
