"""Temporary containers for harnesses and verifiers: Apptainer, or bubblewrap where it is missing."""
