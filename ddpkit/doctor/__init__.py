"""Looking at a machine before a training does: `python -m ddpkit doctor`.

Nothing is imported here, and what needs torch runs in a process of its own: where torch is missing,
crashes or hangs, the rest is still shown, and so is what became of that process.
"""
