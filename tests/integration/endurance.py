"""What long runs against one server process have in common: how its state is read, how it ends, and
what must hold then.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tests.integration.serving import PATIENCE, ServerProcess


@dataclass(kw_only=True)
class Endurance:
    """One run. Its server keeps `state.json` in the folder (`keep_state`).

    Attributes:
        counts: how many requests of each kind are over.
        faults: what was wrong.
        memory: bytes the server's process took, after the first tenth and at the end.
        state: what the server said last of itself.
        most_growth: by what share the memory may grow.
    """

    seed: int
    folder: Path
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    state: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    most_growth: ClassVar[float]

    def read(self) -> dict[str, int]:
        self.state = json.loads((self.folder / "state.json").read_text())
        return self.state

    def settle(self) -> None:
        """Wait until nothing is held, by one engine; then no page may be."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and (self.read()["held"] or self.state["engines"] > 1):
            time.sleep(0.1)
        time.sleep(0.3)  # the figures come ten times a second, and not all at one instant
        state = self.read()
        if state["engines"] != 1 or state["held"] or state["pages"]:
            self.faults.append(f"at the end there were {state}")
        if self.memory:
            self.memory.append(state["bytes"])

    def end(self, server: ServerProcess) -> None:
        """Have the server end, and look at how it does and what it has logged."""
        server.process.terminate()
        if status := server.wait():
            self.faults.append(f"the server ended with {status}")
        bad = [line for line in server.log if "ERROR" in line or "CRITICAL" in line]
        self.faults += [f"in the log: {line}" for line in bad]
        if any("Traceback" in line for line in server.log):
            self.faults.append("a traceback in the log")

    @property
    def growth(self) -> float:
        """Of the memory, as a share; 0 where the system does not tell."""
        return self.memory[-1] / self.memory[0] - 1 if self.memory else 0.0

    def check_bounds(self) -> None:
        """What depends on the machine."""
        if self.growth > self.most_growth:
            self.faults.append(f"memory grew by {self.growth:.1%}")

    def figures(self) -> dict[str, object]:
        return {
            "counts": dict(self.counts),
            "seconds": round(self.seconds, 1),
            "at_the_end": self.state,
            "memory_mib": [round(b / 2**20, 1) for b in self.memory],
            "memory_growth": round(self.growth, 4),
            "faults": len(self.faults),
        }

    def report(self, *, bounds: bool) -> int:
        """Print what came of it; the exit status.

        Args:
            bounds: whether what depends on the machine is judged.
        """
        if bounds:
            self.check_bounds()
        print(json.dumps(self.figures(), indent=2))
        for fault in self.faults[:20]:
            print(fault, file=sys.stderr)
        return 1 if self.faults else 0
