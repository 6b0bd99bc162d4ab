"""Tests that need an accelerator (marker gpu)."""
