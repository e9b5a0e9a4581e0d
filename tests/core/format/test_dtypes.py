import json

import pytest
import torch
from safetensors import deserialize

from dist_ckpt.core.format.dtypes import DTYPES


@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
def test_a_code_is_torchs_name_and_its_size_is_torchs(name):
    dtype = getattr(torch, name)
    assert str(dtype) == f"torch.{name}"
    assert dtype.itemsize == DTYPES[name].itemsize
    assert DTYPES[name].name == name


# The newest torch whose dtypes the table lists. A later torch may add some: they are refused by
# name, as `test_every_dtype_of_torch_can_be_stored_or_is_quantised` checks.
NEWEST_TORCH = (2, 14)


def test_every_dtype_of_torch_but_the_quantised_has_a_code():
    names = {str(d).removeprefix("torch.") for d in vars(torch).values() if type(d) is torch.dtype}
    new = {name for name in names if not name.startswith(("quint", "qint"))} - set(DTYPES)
    if tuple(map(int, torch.__version__.split(".")[:2])) <= NEWEST_TORCH:
        assert new == set()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_safetensors_knows_its_code_and_the_size(dtype):
    shape = [3] if dtype.safetensors else [3, dtype.itemsize]
    end = 3 * dtype.itemsize
    entry = {"dtype": dtype.safetensors or "U8", "shape": shape, "data_offsets": [0, end]}
    header = json.dumps({"w": entry}).encode()
    ((_, tensor),) = deserialize(len(header).to_bytes(8, "little") + header + bytes(end))
    assert tensor["shape"] == shape
