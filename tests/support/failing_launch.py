"""`launch.py` with faults: `failing_launch.py KIND:RANK:STEP[:TIMES][,...] CONFIG.yaml ...`.

A fault happens on one rank before a step is taken, until torchrun has restarted the processes
TIMES times (1). KIND is `kill`, `stop`, `sleep` or `slow`.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

from stampede.engine import trainer
from stampede.engine.processes import restarts

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.stopping import Setting, before_step


def sleep_in_python():
    time.sleep(3600)


def slow_down():
    """From here on each step takes a while."""
    step = trainer.train_step

    def slow(*arguments):
        time.sleep(0.5)
        return step(*arguments)

    trainer.train_step = slow


_FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": sleep_in_python,
    "slow": slow_down,
}


def main():
    for fault in sys.argv.pop(1).split(","):
        kind, rank, step, *times = fault.split(":")
        if os.environ["RANK"] == rank and restarts() < int(times[0] if times else 1):
            before_step(Setting, int(step), _FAULTS[kind])
    launch = Path(__file__).parents[2] / "launch.py"
    sys.argv[0] = str(launch)
    runpy.run_path(str(launch), run_name="__main__")


if __name__ == "__main__":
    main()
