"""Callbacks, marked functions, bare listeners and own events, as users write them; checked by mypy --strict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from loopline import Binding, Callback, Event, Listener, Run, at, on

ROUND_END = Event("round_end", "A round of self-play is done.")


class CountSteps(Callback):
    order = 10
    ranks = "zero"
    reads = frozenset({"metrics/val/loss"})
    on_error = "disable"

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, run: Run) -> None:
        self.steps += 1
        if run.step + 1 >= 100:
            run.stop("enough")

    @on(at.EPOCH_END, every=2)
    def report(self, run: Run) -> None:
        run.log({"steps": self.steps}, weight=1)

    @on(ROUND_END)
    def end_round(self, run: Run, winner: str = "nobody") -> None:
        run.log({"won": float(winner == "me")})

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class Bare:
    def bindings(self, run: Run) -> Iterable[Binding]:
        yield Binding(at.STEP_END, self.note, owner=self, ranks=lambda comm: comm.rank == 1)

    def note(self, run: Run) -> None:
        batch = run.batch
        run.scratch[self] = (batch.index, batch.size, batch.first_of_window)


@on(at.STEP_END, every=100, ranks="local_zero", on_error="warn")
@on(at.EPOCH_END)
def report(run: Run) -> None:
    name: str = at.STEP_END.name
    epochs: int = run.progress.epochs
    heard: bool = run.heard(ROUND_END)
    run.scratch["said"] = (name, epochs, heard, run.plan.describe())


listener: Listener = Bare()
callback: Listener = CountSteps()
run = Run(callbacks=[CountSteps(), Bare(), report])
run.listen(Bare())
run.emit(ROUND_END, winner="me")
result: None = report(run)
