"""Folders that training frameworks wrote: read where they lie."""
