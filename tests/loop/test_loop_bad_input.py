"""What is wrong is said at once, with the value and with what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from loopline import Callback, Every, Never, Progress, Run, SupervisedTask, Task, Trainer, at, loop, on
from loopline.core.errors import (
    BadHandler,
    BadLoader,
    BadStep,
    DuplicateState,
    LooplineError,
    NotAListener,
    UnknownHook,
)
from loopline.testing import Recorder, TinyTask, tiny_loader


def accumulate_by_hand(run):
    """A function that nobody has marked."""


def trainer(task=None, **given):
    return Trainer(task or TinyTask(), progress=False, **given)


class Says(TinyTask):
    """A task whose train_step returns what a function makes of the loss."""

    def __init__(self, say):
        super().__init__()
        self.say = say

    def train_step(self, batch, run):
        return self.say(super().train_step(batch, run)["loss"])


class Lying:
    """A loader whose length is not the number of its batches."""

    def __init__(self, says, gives):
        self.says, self.batches = says, tiny_loader(gives)

    def __len__(self):
        return self.says

    def __iter__(self):
        return iter(self.batches)


class Silent:
    """A loader with a length that gives nothing."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("loader", [[], (), iter([]), Silent()], ids=["list", "tuple", "iterator", "silent"])
def test_an_empty_training_loader_is_an_error(loader):
    with pytest.raises(BadLoader, match=r"training loader gave no batch. Is the dataset empty"):
        trainer().fit(loader, epochs=1)


@pytest.mark.parametrize("sanity", [0, 2])
def test_an_empty_validation_loader_is_an_error(sanity):
    with pytest.raises(BadLoader, match=r"loader gave no batch. Is the dataset empty"):
        trainer(sanity=sanity).fit(tiny_loader(), [], epochs=1)


def test_a_loader_that_can_be_read_once_is_an_error_in_the_second_epoch():
    with pytest.raises(BadLoader, match=r"no batch in epoch 1. If it is a generator or an iterator"):
        trainer().fit(iter(tiny_loader()), epochs=2)


def test_a_validation_loader_that_can_be_read_once_is_an_error_in_the_second_epoch():
    with pytest.raises(BadLoader, match=r"val loader gave no batch in epoch 1. If it is a generator"):
        trainer(sanity=0).fit(tiny_loader(), iter(tiny_loader()), epochs=2)


@pytest.mark.parametrize(
    ("say", "message"),
    [
        (lambda loss: loss.expand(3), r"The loss has the shape \(3,\); it must be one number. Take its mean"),
        (lambda loss: loss.detach(), "The loss has no gradient"),
        (lambda loss: 0.5, "The loss is a float, 0.5; it must be a tensor"),
        (lambda loss: (loss, loss), "The loss is a tuple"),
        (lambda loss: None, "Says.train_step returned None; return the loss"),
        (lambda loss: {"error": loss}, """Says.train_step returned a mapping without "loss" .it has 'error'"""),
        (lambda loss: {}, """returned a mapping without "loss" .it has nothing"""),
        (lambda loss: {"loss": None}, "loss"),
        (lambda loss: {"loss": loss.detach()}, "The loss has no gradient"),
    ],
    ids=["not a scalar", "detached", "float", "tuple", "None", "no loss", "empty", "None in a mapping", "mapping"],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_without_a_usable_loss_is_an_error(say, message, accumulate):
    with pytest.raises(BadStep, match=message):
        trainer(Says(say), accumulate=accumulate).fit(tiny_loader(), epochs=1)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_under_no_grad_is_an_error(accumulate):
    class Frozen(TinyTask):
        def train_step(self, batch, run):
            with torch.no_grad():
                return super().train_step(batch, run)

    with pytest.raises(BadStep, match="under no_grad"):
        trainer(Frozen(), accumulate=accumulate).fit(tiny_loader(), epochs=1)


def test_an_error_of_the_backward_pass_stays_what_it_is():
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        trainer(Says(Breaks.apply)).fit(tiny_loader(), epochs=1)
    assert type(caught.value) is RuntimeError


def test_a_loss_of_one_number_in_a_vector_is_trained_on_and_logged():
    run = trainer(Says(lambda loss: {"loss": loss.reshape(1)})).fit(tiny_loader(), epochs=1)
    plain = trainer().fit(tiny_loader(), epochs=1)
    assert dict(run.metrics) == dict(plain.metrics)


def test_an_eval_step_that_returns_no_mapping_is_an_error():
    class Task(TinyTask):
        def eval_step(self, batch, run):
            return torch.tensor(1.0)

    with pytest.raises(BadStep, match=r"Task.eval_step returned Tensor; it returns a mapping"):
        trainer(Task()).validate(tiny_loader())


def test_no_epochs_are_trained_where_none_are_asked_for():
    recorder = Recorder()
    run = trainer(callbacks=[recorder]).fit(tiny_loader(), epochs=0)
    assert (recorder.names, run.status, run.progress) == (
        ["setup", "fit_start", "train_start", "train_end", "fit_end", "teardown"],
        "completed",
        Progress(),
    )


@pytest.mark.parametrize("limit", ["epochs", "steps"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "3"])
def test_a_limit_that_is_no_count_is_an_error_before_anything_runs(limit, value):
    recorder = Recorder()
    with pytest.raises(ValueError, match=f"{limit}={value!r}: give a whole number, 0 or more"):
        trainer(callbacks=[recorder]).fit(tiny_loader(), **{limit: value})
    assert recorder.names == []


def test_no_limit_is_an_error_before_anything_runs():
    recorder = Recorder()
    with pytest.raises(ValueError, match="Say how far to train"):
        trainer(callbacks=[recorder]).fit(tiny_loader())
    assert recorder.names == []


def test_a_loop_by_hand_without_a_limit_is_an_error():
    run = Run()
    with pytest.raises(ValueError, match="Say how far to train"), loop.fit(run):
        list(loop.epochs(run))


@pytest.mark.parametrize("name", ["epochs", "steps", "batches", "samples", "batches_in_epoch"])
@pytest.mark.parametrize("value", [-1, 0.5])
def test_progress_is_made_of_counts(name, value):
    with pytest.raises(ValueError, match=rf"Progress\({name}={value}\): a count is a whole number"):
        Progress(**{name: value})


def test_a_model_without_parameters_cannot_be_trained():
    task = SupervisedTask(nn.Identity(), loss=nn.MSELoss(), optimizer=SGD([torch.zeros(1, requires_grad=True)]))
    with pytest.raises(BadStep, match="Identity has no parameter that requires a gradient"):
        trainer(task).fit(tiny_loader(), epochs=1)


def test_a_frozen_model_cannot_be_trained():
    task = TinyTask()
    task.model.requires_grad_(False)
    with pytest.raises(BadStep, match="Linear has no parameter that requires a gradient"):
        trainer(task).fit(tiny_loader(), epochs=1)


def test_a_model_without_parameters_can_be_measured():
    class Constant(Task):
        model = nn.Identity()

        def eval_step(self, batch, run):
            return {"loss": torch.tensor(2.0)}

    assert trainer(Constant()).validate(tiny_loader()) == {"val/loss": 2.0}


class Keeping(Callback):
    def state_dict(self):
        return {"kept": 1}


def test_two_of_a_class_that_keep_state_under_one_name_are_an_error():
    with pytest.raises(DuplicateState, match="both save state under the key 'Keeping'"):
        Run(callbacks=[Keeping(), Keeping()])


def test_two_of_a_class_that_keep_state_under_two_names_are_fine():
    class Named(Keeping):
        def __init__(self, key):
            self.key = key

        @property
        def state_key(self):
            return self.key

    assert len(Run(callbacks=[Named("a"), Named("b")]).listeners) == 2


def test_one_object_attached_twice_is_an_error():
    recorder = Recorder()
    with pytest.raises(DuplicateState, match="Recorder is attached twice: the same object"):
        Run(callbacks=[recorder, recorder])


def test_one_function_attached_twice_is_an_error():
    @on(at.STEP_END)
    def report(run):
        pass

    with pytest.raises(DuplicateState, match="report is attached twice"):
        Run(callbacks=[report, report])


@pytest.mark.parametrize("around", [loop.fit, loop.opened])
def test_a_run_is_used_once(around):
    run = Run()
    with around(run):
        pass
    with pytest.raises(LooplineError, match="This run is completed; a run is used once"), around(run):
        pass


def test_a_run_inside_itself_is_an_error():
    run = Run()
    with loop.fit(run), pytest.raises(LooplineError, match="This run is running; a run is used once"), loop.fit(run):
        pass


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"accumulate": 0}, ValueError, r"accumulate=0\): give a whole number, 1 or more"),
        ({"accumulate": 1.5}, ValueError, r"accumulate=1.5\)"),
        ({"accumulate": "2"}, ValueError, r"accumulate='2'\)"),
        ({"accumulate": True}, ValueError, r"accumulate=True\)"),
        ({"sanity": -1}, ValueError, r"sanity=-1\): give a whole number, 0 or more"),
        ({"clip_norm": 0}, ValueError, r"clip_norm=0\): give a norm above 0"),
        ({"clip_norm": -1.0}, ValueError, r"clip_norm=-1.0\)"),
        ({"clip_norm": float("nan")}, ValueError, r"clip_norm=nan\)"),
        ({"clip_norm": "1"}, (ValueError, TypeError), r"clip_norm='1'\)"),
        ({"evaluate": 1}, TypeError, r"evaluate=1\): say when, for example Every"),
        ({"evaluate": Every}, TypeError, r"evaluate=.*Every.*\): say when"),
        ({"strategy": "dpp"}, ValueError, "'dpp' is neither a strategy"),
        ({"precision": "fp8"}, ValueError, "precision='fp8' is not known"),
        ({"strategy": 3}, (ValueError, TypeError), "strategy"),
        ({"precision": 16}, (ValueError, TypeError), "precision"),
        ({"callbacks": Recorder()}, (ValueError, TypeError), "callbacks"),
        ({"callbacks": [Recorder]}, NotAListener, "Recorder is a class"),
        ({"callbacks": [3]}, NotAListener, "is not a listener"),
        ({"callbacks": [accumulate_by_hand]}, NotAListener, "accumulate_by_hand is a plain function"),
        ({"seed": "x"}, (ValueError, TypeError), "seed"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "-",
)
def test_a_wrong_argument_of_the_trainer_is_an_error_when_it_is_made(given, error, message):
    with pytest.raises(error, match=message):
        Trainer(TinyTask(), **{"progress": False} | given)


@pytest.mark.parametrize("given", [nn.Linear(2, 2), TinyTask, None], ids=["a model", "a class", "None"])
def test_a_trainer_wants_a_task(given):
    with pytest.raises(TypeError, match="the first argument is a Task"):
        Trainer(given)


def test_a_callback_whose_method_matches_no_event_is_an_error():
    class Typo(Callback):
        def on_batch_ends(self, run):
            pass

    with pytest.raises(UnknownHook, match=r"Typo.on_batch_ends matches no event.*Did you mean on_batch_end?"):
        Run(callbacks=[Typo()])


def test_a_handler_that_does_not_take_the_run_is_an_error():
    class Wrong(Callback):
        def on_batch_end(self, run, batch):
            pass

    with pytest.raises(BadHandler, match="will be called with the run as its only argument"):
        Run(callbacks=[Wrong()])


@pytest.mark.parametrize("accumulate", [0, -2])
def test_a_window_of_no_batch_is_an_error(accumulate):
    run = Run()
    with pytest.raises(ValueError, match="a window has at least one batch"), loop.fit(run):
        next(loop.batches(run, [1, 2], accumulate=accumulate))


@pytest.mark.parametrize(("says", "gives"), [(5, 3), (4, 5), (2, 1), (9, 1)])
def test_a_loader_whose_length_is_wrong_and_leaves_a_window_open_is_an_error(says, gives):
    message = f"length is {says}, but it gave {gives} batches in epoch 0, so the last window of 2 was never finished"
    with pytest.raises(BadLoader, match=message):
        trainer(accumulate=2).fit(Lying(says, gives), epochs=1)


@pytest.mark.parametrize(("says", "gives"), [(5, 4), (3, 5), (9, 2)])
def test_a_loader_whose_length_is_wrong_without_harm_trains_on_all_it_gives(says, gives):
    run = trainer(accumulate=2).fit(Lying(says, gives), epochs=2)
    assert (run.status, run.progress.batches) == ("completed", 2 * gives)


def test_a_batch_is_in_hand_only_in_a_batch():
    with pytest.raises(LooplineError, match=r"No batch is in hand: run.batch can be read from batch_start"):
        Run().batch  # noqa: B018


def test_logging_in_a_run_that_is_not_open_is_an_error():
    with pytest.raises(LooplineError, match=r"run.log works in a run that is open"):
        Run().log({"loss": 1.0})


def test_a_save_without_a_checkpointer_is_an_error():
    with pytest.raises(LooplineError, match="needs somewhere to save to"):
        Run().save()


def test_an_evaluation_without_data_is_an_error():
    with pytest.raises(LooplineError, match="needs validation data"):
        Run().evaluate()


def test_never_to_evaluate_means_never():
    recorder = Recorder()
    trainer(evaluate=Never(), sanity=0, callbacks=[recorder]).fit(tiny_loader(3), tiny_loader(1), steps=2)
    assert "eval_start" not in recorder.names


def test_the_last_step_is_evaluated_once_where_it_was_due_anyway():
    recorder = Recorder()
    trainer(evaluate=Every(steps=2), sanity=0, callbacks=[recorder]).fit(tiny_loader(3), tiny_loader(1), steps=2)
    assert recorder.names.count("eval_start") == 1


def test_a_fit_stopped_before_it_starts_tries_no_sanity_batches():
    class Stop(Callback):
        def on_fit_start(self, run):
            raise loop.StopRun("not today")

    recorder = Recorder()
    trainer(callbacks=[recorder, Stop()]).fit(tiny_loader(), tiny_loader(), epochs=1)
    assert "sanity_start" not in recorder.names
