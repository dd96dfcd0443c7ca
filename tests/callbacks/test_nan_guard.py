import math

import pytest
import torch
from torch import nn

from loopline import Callback, Run, loop
from loopline.callbacks import ClipNorm, Lambda, NaNGuard
from loopline.core.errors import NotFinite
from loopline.core.progress import Progress
from loopline.testing import run_ranks

GOOD, BAD = 1.0, math.nan


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.second = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.first.weight)
        nn.init.ones_(self.second.weight)

    def forward(self, x):
        return self.second(self.first(x)).mean()


def train(model, guard, inputs, *others, begin=0, **parts):
    """One epoch over such inputs, by Adam, which a NaN would reach for good."""
    run = Run(
        model=model,
        optimizers=[torch.optim.Adam(model.parameters(), lr=0.1)],
        callbacks=[*others, guard],
        progress=Progress(steps=begin, batches=begin, batches_in_epoch=begin),
        **parts,
    )
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for x in loop.batches(run, [torch.full((1, 1), x) for x in inputs]):
                loop.backward(run, model(x))
                loop.optimizer_step(run)
    return run


def finite(model):
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


class BadGradient(Callback):
    """A finite loss, whose gradient is not finite for one parameter."""

    def __init__(self, *steps, name="second.weight", value=math.nan):
        self.steps, self.name, self.value = steps, name, value

    def on_after_backward(self, run):
        if run.step in self.steps:
            run.model.get_parameter(self.name).grad.fill_(self.value)


def test_without_it_the_weights_are_lost():
    model = Two()
    train(model, Lambda(on_epoch_end=print), [GOOD, BAD, GOOD])
    assert not finite(model)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_raise_names_the_loss_and_the_place_and_keeps_the_weights(bad):
    model = Two()
    with pytest.raises(NotFinite, match=f"The loss is {bad} in epoch 0, step 2") as failed:
        train(model, NaNGuard(), [GOOD, GOOD, bad, GOOD])
    assert ("learning rate" in str(failed.value), finite(model)) == (True, True)


def test_raise_names_the_parameters_whose_gradients_are_bad():
    model = Two()
    said = r"The gradients of 1 of 2 parameters are not finite, second.weight \(inf\), in epoch 0, step 1\."
    with pytest.raises(NotFinite, match=said):
        train(model, NaNGuard(), [GOOD] * 3, BadGradient(1, value=math.inf))
    assert finite(model)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["loss", "gradient"])
def test_a_number_that_is_not_finite_ends_the_run_before_the_optimizer_steps(place, bad):
    """The weights are, to the last bit, those of the steps before; the control is the first test of this file."""
    stepped = []
    note = Lambda(on_after_optimizer_step=lambda run: stepped.append(run.step))
    model, other = Two(), Two()
    inputs, spoilt = ([GOOD, GOOD, bad, GOOD], ()) if place == "loss" else ([GOOD] * 4, (2,))
    with pytest.raises(NotFinite):
        train(model, NaNGuard(), inputs, BadGradient(*spoilt, value=bad), note)
    train(other, NaNGuard(), [GOOD, GOOD])
    assert (stepped, model.state_dict()) == ([0, 1], other.state_dict())


def test_the_names_are_right_though_clipping_spreads_the_nan():
    with pytest.raises(NotFinite, match=r"of 1 of 2 parameters are not finite, second.weight \(nan\),"):
        train(Two(), NaNGuard(), [GOOD] * 3, BadGradient(1), ClipNorm(1.0))


def test_only_a_few_names_are_given():
    model = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(9)])
    spoil = Lambda(on_after_backward=lambda run: [p.grad.fill_(math.nan) for p in run.model.parameters()])
    run = Run(model=model, optimizers=[torch.optim.SGD(model.parameters())], callbacks=[spoil, NaNGuard()])
    with pytest.raises(NotFinite, match=r"of 9 of 9 .*4.weight \(nan\) and 4 more, in epoch"), loop.fit(run):  # noqa: PT012
        for _ in loop.epochs(run, 1):
            for x in loop.batches(run, [torch.ones(1, 1)]):
                loop.backward(run, model(x).sum())
                loop.optimizer_step(run)


def test_stop_ends_the_run_before_the_weights_change():
    model = Two()
    run = train(model, NaNGuard("stop"), [GOOD, BAD, GOOD])
    assert (run.status, run.reason, run.progress.steps, finite(model)) == (
        "stopped",
        "The loss is nan in epoch 0, step 1",
        1,
        True,
    )


@pytest.mark.parametrize(("inputs", "spoilt"), [([GOOD, BAD, GOOD], ()), ([GOOD, GOOD, GOOD], (1,))])
def test_skip_leaves_out_the_step_and_nothing_else(inputs, spoilt):
    model, other = Two(), Two()
    guard = NaNGuard("skip")
    run = train(model, guard, inputs, BadGradient(*spoilt))
    train(other, NaNGuard(), [GOOD, GOOD])
    assert (run.status, guard.skipped, model.state_dict()) == ("completed", 1, other.state_dict())


def test_one_bad_batch_spoils_its_whole_window():
    model, other = Two(), Two()
    guard = NaNGuard("skip")
    train(model, guard, [GOOD, BAD, BAD, GOOD, GOOD, GOOD], accumulate=2)
    train(other, NaNGuard(), [GOOD, GOOD], accumulate=2)
    assert (guard.skipped, model.state_dict()) == (2, other.state_dict())


def test_after_so_many_skips_in_a_row_it_gives_up():
    model = Two()
    guard = NaNGuard("skip", max_skips=2)
    with pytest.raises(NotFinite, match=r"in epoch 0, step 5\. The 2 steps before it were skipped"):
        train(model, guard, [BAD, BAD, GOOD, BAD, BAD, BAD])
    assert (guard.skipped, finite(model)) == (4, True)


def test_two_bad_batches_of_one_window_are_one_skip():
    guard = NaNGuard("skip", max_skips=1)
    train(Two(), guard, [BAD, BAD, GOOD, GOOD], accumulate=2)
    assert (guard.skipped, guard.in_a_row) == (1, 1)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_resumed_run_gives_up_where_the_uncut_one_does(cut):
    inputs = [GOOD, BAD, BAD, BAD, GOOD]
    first, second = NaNGuard("skip", max_skips=2), NaNGuard("skip", max_skips=2)
    train(Two(), first, inputs[:cut])
    second.load_state_dict(first.state_dict())
    with pytest.raises(NotFinite, match="step 3"):
        train(Two(), second, inputs, begin=cut)
    assert second.skipped == 2


def test_a_second_run_from_scratch_begins_to_count_anew():
    guard = NaNGuard("skip", max_skips=1)
    train(Two(), guard, [BAD])
    train(Two(), guard, [GOOD, BAD])
    assert guard.skipped == 1


def test_what_is_not_checked_passes():
    model = Two()
    train(model, NaNGuard(check="loss"), [GOOD] * 3, BadGradient(2))
    assert not finite(model)


def test_with_gradients_alone_a_bad_loss_is_found_by_them():
    with pytest.raises(NotFinite, match="The gradients of 2 of 2 parameters"):
        train(Two(), NaNGuard(check=["gradients"]), [GOOD, BAD])


def test_a_step_that_somebody_else_skips_is_not_looked_at():
    skip = Lambda(on_after_backward=lambda run: run.skip_step("mine"))
    assert train(Two(), NaNGuard(), [GOOD] * 3, BadGradient(1), skip).status == "completed"


def test_gradients_that_overflow_under_a_scaler_are_the_scalers_to_handle():
    model = Two()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run = train(model, NaNGuard(), [GOOD] * 3, BadGradient(1, value=math.inf), scaler=scaler)
    assert (run.status, scaler.get_scale(), finite(model)) == ("completed", 2.0, True)


def test_a_bad_loss_under_a_scaler_is_an_error():
    with pytest.raises(NotFinite, match="The loss is nan"):
        train(Two(), NaNGuard(), [GOOD, BAD], scaler=torch.amp.GradScaler("cpu", init_scale=4.0))


def test_on_several_ranks_a_bad_loss_on_one_skips_the_step_on_all():
    def rank(comm):
        model, guard = Two(), NaNGuard("skip")
        train(model, guard, [GOOD, BAD if comm.rank == 1 else GOOD, GOOD], comm=comm)
        return guard.skipped, {name: value.tolist() for name, value in model.state_dict().items()}

    other = Two()
    train(other, NaNGuard(), [GOOD, GOOD])
    expected = 1, {name: value.tolist() for name, value in other.state_dict().items()}
    assert run_ranks(rank, 2) == [expected, expected]


def test_a_loss_in_float64_that_float32_could_not_hold_is_finite():
    model = nn.Linear(1, 1).double()
    nn.init.constant_(model.weight, 1e200)

    def rank(comm):
        run = Run(model=model, callbacks=[NaNGuard()], comm=comm)
        with loop.fit(run):
            for _ in loop.epochs(run, 1):
                for x in loop.batches(run, [torch.ones(1, 1).double()]):
                    loop.backward(run, model(x).sum())
                    loop.optimizer_step(run)
        return run.status

    assert run_ranks(rank, 2) == ["completed"] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"action": "ignore"}, "'ignore'"),
        ({"max_skips": 0}, "max_skips=0"),
        ({"max_skips": 1.5}, "max_skips=1.5"),
        ({"check": ()}, r"check=\(\)"),
        ({"check": "weights"}, "check='weights'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_value(arguments, said):
    with pytest.raises(ValueError, match=said):
        NaNGuard(**arguments)
