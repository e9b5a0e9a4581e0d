"""Pickles read without unpickling: nothing that they name is ever looked up."""
