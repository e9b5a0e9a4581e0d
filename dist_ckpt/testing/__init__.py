"""Fakes that keep the contracts, and suites that check them; nothing in the library imports it."""
