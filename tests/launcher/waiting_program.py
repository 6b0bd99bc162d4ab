"""Rank 0 waits at a barrier for rank 1, which sleeps.

waiting_program.py FOLDER
"""

import sys
import time
from pathlib import Path

import ddpkit

if __name__ == "__main__":
    with ddpkit.process_group(timeout=120):
        if ddpkit.get_rank() == 1:
            (Path(sys.argv[1]) / "asleep").touch()
            time.sleep(100)
        ddpkit.barrier()
