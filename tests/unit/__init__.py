"""Tests that need no process: pure functions with explicit ranks and environments."""
