"""Read folders of accelerate's `save_state`: files of torch.save and safetensors, and DCP folders.

The first model is `model`, the next `model_1`. The same holds for `optim`, `scheduler`, `sampler`,
`dataloader`, `custom_checkpoint` and `scaler`. `rng` has the random generators of each rank, for
`dc.RNG`. The file names are in accelerate/checkpointing.py and utils/fsdp_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import IncompatibleError, NotFoundError
from dist_ckpt.interop.dcp import read as dcp_files
from dist_ckpt.interop.hf import read as safetensors_files
from dist_ckpt.interop.readers.model_files import find_model
from dist_ckpt.interop.readers.nested_state import ImportFilter, NestedState, Path, numbered_name
from dist_ckpt.interop.readers.torch_pickles import NumpyArray, TensorView
from dist_ckpt.interop.readers.virtual_checkpoint import MODEL, ForeignState
from dist_ckpt.interop.torch_save.read import Archive, open_archive, read_dict

# Suffixes of text files without state.
_SUFFIXES_WITHOUT_STATE = (".json", ".md", ".txt", ".yaml", ".yml", ".py", ".log", ".jinja")

_GENERATOR_KEYS = {
    "random_state",
    "numpy_random_seed",
    "torch_manual_seed",
    "torch_cuda_manual_seed",
}


def read(storage: Storage, path: str, import_filter: ImportFilter) -> ForeignState:
    """Return the state in a folder. NotFoundError if accelerate wrote none of its files.

    CorruptError, IncompatibleError for damaged or unknown files, or values that cannot be stored.
    """
    try:
        entries = sorted(storage.list(path, follow=True), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{path}: the folder does not exist; check the path") from None
    folder = _Folder(storage, path, import_filter)
    names = [entry.name for entry in entries if not entry.name.endswith(_SUFFIXES_WITHOUT_STATE)]
    for name in names:
        folder.add(name)
    for suffix in (".safetensors", ".bin"):
        find_model(names, suffix, path)  # NotFoundError if one of its files is missing
    if not folder.num_known:
        raise NotFoundError(
            f"{path} has no file of accelerate's save_state, such as optimizer.bin; check the path"
        )
    return folder.nested.state()


class _Folder:
    """Collects the state of a folder, file by file. `num_known` counts accelerate's files."""

    def __init__(self, storage: Storage, path: str, import_filter: ImportFilter) -> None:
        self.nested = NestedState(path, import_filter)
        self.num_known = 0
        self._storage = storage
        self._path = path

    def add(self, name: str) -> None:
        """Add a file or folder. IncompatibleError if its name is unknown."""
        path = f"{self._path}/{name}"
        for pattern, add in _FILES.items():
            if (match := re.fullmatch(pattern, name)) is not None:
                self.num_known += 1
                number = int(match[2] or 0) if match.re.groups > 1 else 0
                add(self, path, numbered_name(_COMPONENTS.get(match[1], match[1]), number), match)
                return
        raise IncompatibleError(
            f"{path} is not a known file of accelerate's save_state: move it away, or import it "
            f"alone if it is a file of torch.save (--from torch)"
        )

    def add_safetensors(self, path: str, top: str, _: re.Match[str]) -> None:
        """Add a model, or the tensors in one of its files."""
        for tensor in safetensors_files.read_file(self._storage, path).tensors:
            fqn = tensor.fqn.removeprefix(f"{MODEL}.")
            self.nested.add_tensor((top, fqn), replace(tensor, fqn=f"{top}.{fqn}"))

    def add_weights(self, path: str, top: str, _: re.Match[str]) -> None:
        """Add a model in a file of torch.save, or a part of one."""
        with open_archive(self._storage, path) as archive:
            state = read_dict(archive)
            self.nested.add_versions(top, state, state, archive.budget)
            for name, value in state.items():
                self.nested.add((top, str(name)), value, archive)

    def add_pickled(self, path: str, top: str, match: re.Match[str]) -> None:
        """Add anything in a file of torch.save."""
        if self.nested.excludes(top):
            return
        with open_archive(self._storage, path) as archive:
            value = archive.read()
            if match[1] == "optimizer":
                model = f"model{top.removeprefix('optim')}"  # of the same number
                self.nested.add_optimizer((top,), value, model, archive)
            else:
                self.nested.add((top,), value, archive)

    def add_generators(self, path: str, _: str, match: re.Match[str]) -> None:
        """Add the random generators of a rank."""
        rank = int(match[2])
        if self.nested.excludes("rng"):
            return
        with open_archive(self._storage, path) as archive:
            state = read_dict(archive)
            if not rank and "step" in state:
                self.nested.add(("accelerate_step",), state["step"], archive)
            if strange := sorted(map(str, state.keys() - _GENERATOR_KEYS - {"step"})):
                raise IncompatibleError(
                    f"{path} has {', '.join(strange)}, which dc.RNG does not support: leave all "
                    f"generators out (exclude='rng', on the command line --exclude rng)"
                )
            self.nested.add_rank_value(
                ("rng",), rank, _read_generators(state, rank, archive), archive
            )

    def add_distributed(self, path: str, top: str, match: re.Match[str]) -> None:
        """Add a folder of torch.distributed.checkpoint, which has all of it under one key."""
        only_key = "optimizer" if match[1] == "optimizer" else "model"

        def map_path(path: Path) -> Path:
            key, *rest = path
            return (top, *rest) if key == only_key else path

        dcp_files.add_folder(self.nested, self._storage, path, map_path)

    def refuse(self, path: str, _: str, match: re.Match[str]) -> None:
        """Refuse a form that cannot be read, with the remedy."""
        raise IncompatibleError(f"{path}{_REMEDIES[match[1]]}")


def _read_generators(
    state: Mapping[object, object], rank: int, archive: Archive
) -> dict[str, object]:
    """Return the states as `dc.RNG` has them; with several GPUs, the GPU of the rank's number."""
    states: dict[str, object] = {"python": state.get("random_state")}
    match state.get("numpy_random_seed"):
        case ("MT19937", NumpyArray() as key, int(at), int(has), float(gauss)) if key.value:
            states["numpy"] = (bytes(key.value.data), at, has, gauss)
        case None:
            pass
        case _:
            raise IncompatibleError(f"{archive.label}: numpy's generator is not MT19937")
    cpu = state.get("torch_manual_seed")
    if isinstance(cpu, TensorView):
        states["torch"] = archive.read_tensor(cpu, "torch_manual_seed")
    devices = state.get("torch_cuda_manual_seed")
    if isinstance(devices, list) and devices:
        view = devices[rank % len(devices)]
        if isinstance(view, TensorView):
            states["accelerator"] = ("cuda", archive.read_tensor(view, "torch_cuda_manual_seed"))
    return states


_COMPONENTS = {
    "pytorch_model": "model",
    "pytorch_model_fsdp": "model",
    "optimizer": "optim",
    "dl_state_dict": "dataloader",
}

_RANK_FILE = (
    " is the file of one FSDP rank, which only the same number of ranks can read: save with "
    "SHARDED_STATE_DICT and use_dcp=True, or with FULL_STATE_DICT"
)

_REMEDIES = {
    "pytorch_model": (
        " is a folder of DeepSpeed: import it alone (--from deepspeed), then move it away and "
        "import the rest of this folder"
    ),
    "pytorch_model_fsdp": _RANK_FILE,
    "optimizer": _RANK_FILE,
}

# The function for each pattern of a file's or folder's name. The first matching pattern counts.
_FILES: Mapping[str, Callable[[_Folder, str, str, re.Match[str]], None]] = {
    r"(model)(?:_(\d+))?\.safetensors": _Folder.add_safetensors,
    r"(model)-\d+-of-\d+\.safetensors": _Folder.add_safetensors,
    r"(pytorch_model)(?:_(\d+))?\.bin": _Folder.add_weights,
    r"(pytorch_model)-\d+-of-\d+\.bin": _Folder.add_weights,
    r"(pytorch_model_fsdp|optimizer)(?:_\d+)?_rank\d+\.bin": _Folder.refuse,
    r"(pytorch_model_fsdp)(?:_(\d+))?\.bin": _Folder.add_weights,
    r"(optimizer|scheduler|sampler|dl_state_dict)(?:_(\d+))?\.bin": _Folder.add_pickled,
    r"(scaler)\.pt": _Folder.add_pickled,
    r"(custom_checkpoint)_(\d+)\.pkl": _Folder.add_pickled,
    r"(random_states)_(\d+)\.pkl": _Folder.add_generators,
    r"(pytorch_model_fsdp|optimizer)_(\d+)": _Folder.add_distributed,
    r"(pytorch_model)": _Folder.refuse,
}
