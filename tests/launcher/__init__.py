"""Tests that run real scripts under python and under torchrun."""
