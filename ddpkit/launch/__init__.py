"""Starting ranks on this machine, and what becomes of them.

Nothing is imported here: a process that starts no ranks need not pay for what starts them.
"""
