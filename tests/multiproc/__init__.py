"""Tests that start ranks on the CPU with ddpkit.testing.run_ranks."""
