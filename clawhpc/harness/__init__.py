"""Adapters: how to install, launch and understand each opaque agent harness."""
