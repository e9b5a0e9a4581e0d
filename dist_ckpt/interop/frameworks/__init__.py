"""Read folders that training frameworks wrote, in place.

Adapters that run inside a training loop of a framework are in `integrations/`.
"""
