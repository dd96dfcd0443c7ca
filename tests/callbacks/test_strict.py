import pytest
from torch import nn

from loopline import Callback, Every, Run, Trainer, at, loop
from loopline.callbacks import Lambda, Strict
from loopline.sinks import Sink
from loopline.testing import TinyTask, tiny_loader


def fails(run):
    raise OSError("no disk")


def one_epoch(*callbacks, sinks=()):
    trainer = Trainer(TinyTask(), callbacks=callbacks, sinks=sinks, progress=False)
    return trainer.fit(tiny_loader(), epochs=1)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("policy", ["disable", "warn"])
def test_a_failure_that_would_be_passed_over_ends_the_run(policy, first):
    lax = Lambda(on_step_end=fails, on_error=policy)
    with pytest.raises(OSError, match="no disk") as caught:
        one_epoch(*([Strict(), lax] if first else [lax, Strict()]))
    assert caught.value.__notes__ == ["raised by Lambda at step_end, epoch 0, step 0"]


@pytest.mark.parametrize("policy", ["disable", "warn"])
def test_without_it_the_same_failure_is_passed_over(policy, caplog):
    assert one_epoch(Lambda(on_step_end=fails, on_error=policy)).status == "completed"


def test_an_observer_that_hangs_is_an_error():
    def hangs(run):
        while True:
            pass

    with pytest.raises(TimeoutError, match="took longer than 1 s"):
        one_epoch(Lambda(on_epoch_end=hangs, on_error="disable"), Strict())


@pytest.mark.parametrize("event", [at.SETUP, at.TEARDOWN])
def test_the_ends_of_a_run_are_no_exception(event, caplog):
    lax = Lambda(**{f"on_{event.name}": fails}, on_error="disable")
    with pytest.raises((OSError, ExceptionGroup), match=r"no disk|errors at teardown"):
        one_epoch(lax, Strict())


class Broken(Sink):
    when = Every(steps=1)

    def write(self, record):
        raise OSError("no disk")


def test_a_sink_that_failed_is_an_error_at_the_end(caplog):
    with pytest.raises(ExceptionGroup, match="errors at teardown") as caught:
        one_epoch(Strict(), sinks=[Broken()])
    (sinks,) = caught.value.exceptions
    assert [str(error) for error in sinks.exceptions] == ["no disk"]


def test_without_it_a_sink_that_failed_is_a_warning(caplog):
    assert one_epoch(sinks=[Broken()]).status == "completed"


def test_attached_later_it_counts_from_then_on(caplog):
    lax = Lambda(on_step_end=fails, on_error="disable")
    run = Run(callbacks=[lax])
    run.emit(at.STEP_END)
    run.epoch = 1
    run.listen(Strict())
    with pytest.raises(OSError, match="no disk"):
        run.emit(at.STEP_END)


def test_an_observer_is_kept_apart_as_without_it():
    model = nn.Dropout()
    with loop.opened(Run(model=model, callbacks=[Strict(), Evals()])) as run:
        run.emit(at.STEP_END)
    assert model.training


class Evals(Callback):
    on_error = "disable"

    def on_step_end(self, run):
        run.model.eval()
