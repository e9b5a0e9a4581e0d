"""Read folders that training frameworks wrote, in place."""
