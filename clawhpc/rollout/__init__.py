"""Run one harness on one task."""
