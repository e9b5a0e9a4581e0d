"""The random generators of this process as plain data: Python's, numpy's, torch's.

Numpy and torch are looked up, not imported: a program that did not import them has not used their
generators.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dist_ckpt.errors import IncompatibleError

_PARTS = ("python", "numpy", "torch", "accelerator")


def capture() -> dict[str, object]:
    """Return the states of the global generators, and of the current accelerator device's."""
    data: dict[str, object] = {"python": random.getstate()}
    if "numpy" in sys.modules:
        data["numpy"] = _numpy_state(sys.modules["numpy"])
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        data["torch"] = _bytes(torch.get_rng_state())
        device = _accelerator(torch)
        if device is not None and _is_initialized(torch, device):
            data["accelerator"] = (device, _bytes(getattr(torch, device).get_rng_state()))
    return data


def check(data: object) -> None:
    """Raise IncompatibleError if these states cannot be set here. Sets nothing."""
    if not isinstance(data, dict) or not set(data) <= set(_PARTS):
        raise IncompatibleError(
            "the saved value is not a state of random generators: exclude it from the load"
        )
    for part, state in data.items():
        try:
            _CHECKS[part](state)
        except (TypeError, ValueError, RuntimeError, KeyError, OverflowError) as error:
            raise IncompatibleError(
                f"the saved state of the {part} generator cannot be set here ({error}): exclude "
                "it from the load, and seed the generators yourself"
            ) from error


def restore(data: object) -> None:
    """Set the generators to states that `check` has accepted."""
    assert isinstance(data, dict)
    if "python" in data:
        random.setstate(data["python"])
    if "numpy" in data and (numpy := _module("numpy")):
        numpy.random.set_state(_numpy_arguments(data["numpy"]))
    if "torch" in data and (torch := _module("torch")):
        torch.set_rng_state(_tensor(torch, data["torch"]))
    if "accelerator" in data and (torch := _module("torch")):
        device, state = data["accelerator"]
        getattr(torch, device).set_rng_state(_tensor(torch, state))


def _check_python(state: Any) -> None:
    random.Random().setstate(state)  # noqa: S311 - it only tries the state


def _check_numpy(state: Any) -> None:
    arguments = _numpy_arguments(state)
    if numpy := _module("numpy"):
        numpy.random.RandomState().set_state(arguments)


def _check_torch(state: Any) -> None:
    if torch := _module("torch"):
        torch.Generator().set_state(_tensor(torch, state))


def _check_accelerator(state: Any) -> None:
    device, data = state
    torch = _module("torch")
    here = _accelerator(torch) if torch else None
    if torch is None or here is None or device != here:
        raise ValueError(f"it is for {device!r}, the accelerator here is {here!r}")
    torch.Generator(device).set_state(_tensor(torch, data))


_CHECKS: dict[str, Callable[[Any], None]] = {
    "python": _check_python,
    "numpy": _check_numpy,
    "torch": _check_torch,
    "accelerator": _check_accelerator,
}


def _numpy_state(numpy: ModuleType) -> tuple[bytes, int, int, float]:
    state = numpy.random.get_state(legacy=False)
    if (kind := state["bit_generator"]) != "MT19937":
        raise TypeError(
            f"numpy's global generator is {kind}, which RNG does not support: store its state in a "
            "PerRank"
        )
    key: bytes = state["state"]["key"].astype("<u4").tobytes()
    return key, state["state"]["pos"], state["has_gauss"], state["gauss"]


def _numpy_arguments(
    state: tuple[bytes, int, int, float],
) -> tuple[str, list[int], int, int, float]:
    key, position, has_gauss, gauss = state
    if len(key) != 624 * 4:
        raise ValueError(f"its key has {len(key)} bytes instead of 2496")
    numbers = [int.from_bytes(key[i : i + 4], "little") for i in range(0, len(key), 4)]
    return "MT19937", numbers, position, has_gauss, gauss


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _accelerator(torch: ModuleType) -> str | None:
    if not torch.accelerator.is_available():
        return None
    return str(torch.accelerator.current_accelerator().type)


def _is_initialized(torch: ModuleType, device: str) -> bool:
    """Return True if the program has used the accelerator; this must not initialise it."""
    module = getattr(torch, device)
    return not hasattr(module, "is_initialized") or bool(module.is_initialized())


def _bytes(state: Any) -> bytes:
    return bytes(state.cpu().tolist())


def _tensor(torch: ModuleType, state: bytes) -> Any:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
