"""Names of before are refused, and the error says the new ones."""

from __future__ import annotations

import inspect

import pytest

from dist_ckpt.core.runtime.public_names import refuse_old_attributes, refuse_old_parameters


@refuse_old_parameters(frozen="include_frozen")
def save(path: str, *, include_frozen: bool = True) -> tuple[str, bool]:
    return path, include_frozen


class Run:
    __getattr__ = refuse_old_attributes("Run", {"hold": "lease"})

    def lease(self) -> str:
        return "a lease"


def test_an_old_parameter_is_refused_with_its_new_name() -> None:
    with pytest.raises(
        TypeError, match=r"frozen= is called include_frozen= since dist_ckpt 0\.2\.0"
    ):
        save("a", frozen=False)  # type: ignore[call-arg]
    assert save("a", include_frozen=False) == ("a", False)


def test_the_signature_is_that_of_the_function() -> None:
    assert list(inspect.signature(save).parameters) == ["path", "include_frozen"]


def test_an_old_attribute_is_refused_with_its_new_name() -> None:
    with pytest.raises(AttributeError, match=r"Run\.hold is called lease"):
        getattr(Run(), "hold")  # noqa: B009  (mypy knows that it has none)
    with pytest.raises(AttributeError, match="'Run' object has no attribute 'other'"):
        getattr(Run(), "other")  # noqa: B009
    assert Run().lease() == "a lease"
