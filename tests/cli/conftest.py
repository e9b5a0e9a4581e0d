"""Tests here run commands."""

from commands import run

__all__ = ["run"]
