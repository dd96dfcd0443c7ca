import pytest

from loopline import Callback, Run, at, loop
from loopline.callbacks import Lambda
from loopline.core.errors import BadHandler, UnknownHook


def one_epoch(*callbacks):
    run = Run(callbacks=callbacks)
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for _ in loop.batches(run, [1, 2]):
                pass
    return run


def test_each_function_is_called_at_the_moment_of_its_name():
    heard = []
    one_epoch(
        Lambda(
            on_train_end=lambda run: heard.append("train_end"),
            on_step_end=lambda run: heard.append(f"step_end {run.step}"),
            on_epoch_start=lambda run: heard.append("epoch_start"),
        )
    )
    assert heard == ["epoch_start", "step_end 0", "step_end 1", "train_end"]


def test_moments_without_a_function_stay_out_of_the_plan():
    run = Run(callbacks=[Lambda(on_step_end=lambda run: None)])
    assert [event.name for event, handlers in run.plan.items() if handlers] == ["step_end"]


def test_an_unknown_name_is_the_error_that_a_method_of_that_name_would_be():
    class Typo(Callback):
        def on_epoch_ends(self, run): ...

    with pytest.raises(UnknownHook) as of_method:
        Run(callbacks=[Typo()])
    with pytest.raises(UnknownHook) as of_lambda:
        Lambda(on_epoch_ends=lambda run: None)
    said = "Lambda.on_epoch_ends matches no event and would never be called. Did you mean on_epoch_end?"
    assert str(of_lambda.value) == said == str(of_method.value).replace(Typo.__qualname__, "Lambda")


@pytest.mark.parametrize("name", ["epoch_end", "onEpochEnd", "state_dict"])
def test_a_name_that_does_not_begin_with_on_is_unknown_too(name):
    with pytest.raises(UnknownHook, match=f"Lambda.{name} matches no event"):
        Lambda(**{name: lambda run: None})


def test_a_function_that_cannot_take_the_run_is_refused():
    with pytest.raises(BadHandler) as refused:
        Lambda(on_epoch_end=lambda run, metrics: None)
    assert refused.value.__notes__ == ["given as on_epoch_end"]


@pytest.mark.parametrize("wrong", [None, "print", 3])
def test_what_is_not_a_function_is_refused(wrong):
    with pytest.raises(BadHandler, match=f"Lambda binds {wrong!r} to epoch_end, which cannot be called"):
        Lambda(on_epoch_end=wrong)


def test_a_lambda_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no functions"):
        Lambda(order=1)


def test_order_decides_who_is_first():
    heard = []
    one_epoch(
        Lambda(on_epoch_end=lambda run: heard.append("late"), order=1),
        Lambda(on_epoch_end=lambda run: heard.append("early"), order=-1),
    )
    assert heard == ["early", "late"]


def test_writers_come_before_readers():
    heard = []
    one_epoch(
        Lambda(on_epoch_end=lambda run: heard.append("reader"), reads={"metrics/val/f1"}),
        Lambda(on_epoch_end=lambda run: heard.append("writer"), writes="metrics"),
    )
    assert heard == ["writer", "reader"]


def test_ranks_are_kept():
    assert Run(callbacks=[Lambda(on_epoch_end=print, ranks=lambda comm: comm.rank == 1)]).plan[at.EPOCH_END] == ()


def test_a_failure_does_what_on_error_says(caplog):
    def fail(run):
        raise OSError("disk")

    run = one_epoch(Lambda(on_epoch_end=fail, on_error="warn"))
    assert (run.status, [record.levelname for record in caplog.records]) == ("completed", ["WARNING"] * 2)


def test_bound_methods_and_partial_functions_will_do():
    heard = []
    one_epoch(Lambda(on_epoch_end=heard.append))
    assert len(heard) == 1
