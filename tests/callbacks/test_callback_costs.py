import json
import re

import pytest
import torch

from loopline import Binding, Callback, Event, Run, at, loop
from loopline.callbacks import CallbackCosts

MS = 1_000_000


class Clock:
    """A clock that moves only when told to."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now

    def pass_ms(self, ms):
        self.now += ms * MS


def run_of(clock, costs, *callbacks, epochs=1, batches=2, forward=5, backward=3):
    """A run in which each forward and each backward pass takes so many milliseconds, and nothing else takes any."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            clock.pass_ms(backward)
            return gradient

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(model=model, optimizers=[optimizer], callbacks=[*callbacks, costs])
    with loop.fit(run):
        for _ in loop.epochs(run, epochs):
            for x in loop.batches(run, [torch.ones(1, 1)] * batches):
                clock.pass_ms(forward)
                loop.backward(run, Slow.apply(model(x)).sum())
                loop.optimizer_step(run)
            for _ in loop.evaluate(run, [1, 2]):
                clock.pass_ms(1)
    return run


def costs_of(clock, **given):
    return CallbackCosts(clock=clock, write=lambda text: None, **given)


def table(costs):
    return {(row.name, row.event): (row.calls, round(row.total_s * 1e3)) for row in costs.rows() if row.total_s}


class Slow(Callback):
    """Takes so many milliseconds at each of the seams that are named."""

    def __init__(self, clock, **seams):
        for seam, ms in seams.items():
            setattr(self, f"on_{seam}", lambda run, ms=ms: clock.pass_ms(ms))


def test_each_moment_is_charged_once_and_to_whoever_took_it():
    clock = Clock()
    costs = costs_of(clock)
    # before_zero_grad is inside the forward phase, eval_batch_end inside the evaluation
    run_of(clock, costs, Slow(clock, step_end=2, before_zero_grad=10, eval_batch_end=20))
    assert table(costs) == {
        ("forward", "batch_start"): (2, 10),
        ("backward", "before_backward"): (2, 6),
        ("evaluation", "eval_start"): (1, 2),
        ("Slow", "step_end"): (2, 4),
        ("Slow", "before_zero_grad"): (2, 20),
        ("Slow", "eval_batch_end"): (2, 40),
    }


def test_the_phases_hold_no_handler_whatever_its_order():
    clock = Clock()
    costs = costs_of(clock)
    early, late = Slow(clock, batch_start=7, after_backward=7), Slow(clock, batch_start=7, after_backward=7)
    early.order, late.order = -(10**9), 10**9
    run_of(clock, costs, early, late)
    phases = {name: spent for (name, _), spent in table(costs).items() if name != "Slow" and name != "Slow #2"}
    assert phases == {"forward": (2, 10), "backward": (2, 6), "evaluation": (1, 2)}


def test_a_handler_inside_a_handler_is_not_counted_twice():
    clock = Clock()
    costs = costs_of(clock)
    inner = Event("inner")

    class Outer(Callback):
        def on_step_end(self, run):
            clock.pass_ms(1)
            run.emit(inner)
            clock.pass_ms(1)

        def bindings(self, run):
            yield from super().bindings(run)
            yield Binding(inner, lambda run: clock.pass_ms(7), self)

    run_of(clock, costs, Outer(), batches=1)
    outer = {event: spent for (name, event), spent in table(costs).items() if name.endswith("Outer")}
    assert outer == {"step_end": (1, 2), "inner": (1, 7)}


def test_the_time_of_a_handler_that_fails_counts():
    clock = Clock()
    costs = costs_of(clock)

    class Fails(Callback):
        def on_step_end(self, run):
            clock.pass_ms(4)
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        run_of(clock, costs, Fails())
    assert [(row.event, row.calls, row.total_s) for row in costs.rows() if "Fails" in row.name] == [
        ("step_end", 1, 0.004)
    ]


def test_shares_are_of_the_training_time():
    clock = Clock()
    costs = costs_of(clock)
    run_of(clock, costs, Slow(clock, fit_start=1000, step_end=2), batches=10)  # 10 x (5 + 3 + 2) + 2 ms
    assert {row.event: round(row.share, 4) for row in costs.rows() if row.event in ("batch_start", "step_end")} == {
        "batch_start": round(50 / 102, 4),
        "step_end": round(20 / 102, 4),
    }


def test_the_costliest_comes_first_and_the_rest_is_told():
    clock = Clock()
    lines = []
    costs = CallbackCosts(clock=clock, write=lines.append)

    class Own(Callback):
        def on_epoch_start(self, run):
            clock.pass_ms(1)

    run_of(clock, costs, Own(), batches=1)
    clock_free = [re.sub(r" {2,}", "  ", line) for line in "".join(lines).splitlines()]
    assert [line for line in clock_free if not re.search(r"\b0\.0 us", line)] == [
        "what  event  calls  total  mean  share",
        "forward  1  5.00 ms  5.00 ms  45.5%",
        "backward  1  3.00 ms  3.00 ms  27.3%",
        "evaluation  1  2.00 ms  2.00 ms  18.2%",
        "test_the_costliest_comes_first_and_the_rest_is_told.<locals>.Own  epoch_start  1  1.00 ms  1.00 ms  9.1%",
        "training  11.00 ms",
    ]


def test_what_nobody_is_charged_for_is_the_loops_and_the_users():
    clock = Clock()
    costs = costs_of(clock)
    run = Run(callbacks=[costs])
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            clock.pass_ms(30)
            for _ in loop.batches(run, [1]):
                pass
    assert re.search(r"the loop and your own code +30\.00 ms +100\.0%", str(costs))


def test_two_callbacks_of_one_class_are_told_apart():
    clock = Clock()
    costs = costs_of(clock)
    run_of(clock, costs, Slow(clock, step_end=2), Slow(clock, step_end=1), batches=1)
    assert [row.name for row in costs.rows() if row.event == "step_end"] == ["Slow", "Slow #2"]


def test_listening_later_does_not_count_anything_twice():
    clock = Clock()
    costs = costs_of(clock)

    class Joins(Callback):
        def on_setup(self, run):
            run.listen(Callback())

    run_of(clock, costs, Joins(), Slow(clock, step_end=2))
    assert table(costs)["Slow", "step_end"] == (2, 4)


def test_whoever_is_over_the_budget_is_named_once_after_the_warm_up(caplog):
    clock = Clock()
    run_of(clock, costs_of(clock), Slow(clock, step_end=1, batch_start=2), Slow(clock, batch_end=0), batches=100)
    assert [record.getMessage() for record in caplog.records] == [
        "CallbackCosts: Slow takes 27 % of the time per step, most of it at batch_start; the budget is 5 %."
    ]


def test_an_observer_is_held_to_the_budget_like_any_other(caplog):
    clock = Clock()
    observer = Slow(clock, step_end=1)
    observer.on_error = "disable"
    run_of(clock, costs_of(clock, budget=0.01), observer, batches=100)
    assert [record.getMessage() for record in caplog.records] == [
        "CallbackCosts: Slow takes 11 % of the time per step, most of it at step_end; the budget is 1 %."
    ]


def test_nobody_is_warned_about_in_the_warm_up(caplog):
    clock = Clock()
    run_of(clock, costs_of(clock), Slow(clock, step_end=100), batches=20)
    assert caplog.records == []


def test_one_slow_call_is_no_alarm(caplog):
    clock = Clock()

    class Rare(Callback):
        def on_step_end(self, run):
            if run.step == 50:
                clock.pass_ms(10_000)

    run_of(clock, costs_of(clock), Rare(), batches=100)
    assert caplog.records == []


def test_what_happens_once_an_epoch_is_not_counted_by_the_step(caplog):
    clock = Clock()
    run_of(clock, costs_of(clock), Slow(clock, epoch_end=10_000), batches=30, epochs=3)
    assert caplog.records == []


def test_the_trace_holds_complete_events_in_microseconds(tmp_path):
    clock = Clock()
    path = tmp_path / "deep" / "trace.json"
    run_of(clock, costs_of(clock, trace=path), Slow(clock, step_end=2), batches=1)
    trace = json.loads(path.read_text())
    assert [
        (event["name"], event["args"]["event"], event["ts"], event["dur"])
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["dur"]
    ] == [
        ("forward", "batch_start", 0.0, 5000.0),
        ("backward", "before_backward", 5000.0, 3000.0),
        ("Slow", "step_end", 8000.0, 2000.0),
        ("evaluation", "eval_start", 10000.0, 2000.0),
    ]


def test_a_trace_that_is_full_says_how_much_was_left_out(tmp_path, caplog):
    clock = Clock()
    path = tmp_path / "trace.json"
    run_of(clock, costs_of(clock, trace=path, max_events=3), batches=10)
    trace = json.loads(path.read_text())
    kept = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    left_out = trace["otherData"]["events left out"]
    # 10 each of forward, backward, optimizer step; one evaluation; 11 fetches, the last of which finds the end
    assert (len(kept), left_out, f"{left_out} more were left out" in caplog.text) == (3, 10 * 3 + 1 + 11 - 3, True)


def test_a_second_run_is_measured_by_itself():
    clock = Clock()
    costs = costs_of(clock)
    callback = Slow(clock, step_end=2)
    run_of(clock, costs, callback, batches=5)
    run_of(clock, costs, callback, batches=2)
    assert table(costs)["Slow", "step_end"] == (2, 4)


def test_without_it_handlers_are_called_as_they_are():
    callback = Slow(Clock(), step_end=1)
    assert Run(callbacks=[callback]).plan[at.STEP_END] == (callback.on_step_end,)


@pytest.mark.parametrize("given", [{"budget": 0}, {"budget": 5}, {"max_events": 0}])
def test_numbers_that_make_no_sense_are_refused(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        CallbackCosts(**given)
