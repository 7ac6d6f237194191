"""A training run one process of which dies: `python -m tests.train.faulty_run HOW STEP [options of python -m train]`.

HOW: `raise` or `exit`; the process with RANK 1 does so before optimizer step STEP.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from train.__main__ import leave, main
from train.trainer import Trainer


def die_at(how: str, step: int) -> None:
    real = Trainer._step

    def dying(self: Trainer, at: int, window: Any) -> Any:
        if os.environ["RANK"] == "1" and at == step:
            if how == "exit":
                os._exit(9)
            raise RuntimeError("this process dies")
        return real(self, at, window)

    Trainer._step = dying  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    die_at(sys.argv[1], int(sys.argv[2]))
    leave(main(sys.argv[3:]))
