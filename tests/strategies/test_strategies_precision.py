"""The numbers of the forward pass."""

import pytest
import torch
from torch import nn

from loopline import Bf16, Callback, Fp16, Fp32, Run, Scheduled, SupervisedTask, Trainer, loop
from loopline.core.when import Every
from loopline.strategies import Precision, precision_of

CPU = torch.device("cpu")


class Sees(nn.Module):
    """Remembers in which numbers its linear layer answered, and multiplies its output at will."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.linear, self.factor, self.seen = nn.Linear(2, 1), factor, []

    def forward(self, x):
        y = self.linear(x)
        self.seen.append(y.dtype)
        return y * self.factor


def supervised(model, **given):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return SupervisedTask(model, loss=nn.functional.mse_loss, optimizer=optimizer, **given)


def pairs(count):
    return [(torch.ones(2, 2), torch.zeros(2, 1))] * count


def test_full_precision_gives_back_the_very_function():
    assert Fp32().forward(pairs, CPU) is pairs


def test_only_half_precision_needs_a_scaler():
    scalers = [precision.scaler(CPU) for precision in (Fp32(), Bf16(), Fp16(scale=False))]
    assert (scalers, Fp16(init_scale=8.0).scaler(CPU).get_scale()) == ([None, None, None], 8.0)


@pytest.mark.parametrize(
    ("given", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_forward_pass_runs_in_the_numbers_that_were_asked_for(given, dtype):
    model = Sees()
    Trainer(supervised(model), precision=given, progress=False, strategy="cpu").fit(pairs(1), pairs(1), epochs=1)
    assert (set(model.seen), len(model.seen), model.linear.weight.dtype) == ({dtype}, 3, torch.float32)


def test_a_wrapped_function_keeps_its_name():
    assert Bf16().forward(pairs, CPU).__name__ == "pairs"


def test_autocast_ends_with_the_function():
    Bf16().forward(lambda: None, CPU)()
    assert torch.is_autocast_enabled("cpu") is False


def test_a_precision_may_be_an_object():
    class Mine(Fp32): ...

    mine = Mine()
    assert precision_of(mine) is mine


@pytest.mark.parametrize(("name", "kind"), [("fp32", Fp32), ("bf16", Bf16), ("fp16", Fp16)])
def test_a_precision_may_be_a_name(name, kind):
    assert type(precision_of(name)) is kind


def test_an_unknown_precision_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="not known") as caught:
        precision_of("fp8")
    assert str(caught.value) == (
        "precision='fp8' is not known; it can be 'fp32', 'bf16', 'fp16' or an object of yours."
    )


@pytest.mark.parametrize("wrong", [torch.bfloat16, 16, None])
def test_what_is_no_precision_is_refused_at_once(wrong):
    with pytest.raises((TypeError, ValueError), match="precision"):
        precision_of(wrong)


def test_every_precision_has_what_a_precision_has():
    asked = [name for name in vars(Precision) if not name.startswith("_")]
    assert [(kind, name) for kind in (Fp32, Bf16, Fp16) for name in asked if not hasattr(kind, name)] == []


class Notes(Callback):
    """What each step came to."""

    def __init__(self):
        self.steps, self.changed = [], 0

    def on_after_optimizer_step(self, run):
        self.changed += 1

    def on_step_end(self, run):
        self.steps.append((run.skipped, run.scaler.get_scale(), run.optimizers[0].param_groups[0]["lr"]))


def half(factor, *, steps):
    """Train in half precision on the cpu; where the factor is large, the scaled gradients overflow."""
    model, notes = Sees(factor), Notes()
    task = supervised(model)
    steps_scheduler = torch.optim.lr_scheduler.LambdaLR(task.optimizer, lambda step: 1.0 / (1 + step))
    task.scheduler = Scheduled(scheduler=steps_scheduler, when=Every(steps=1))
    before = model.linear.weight.detach().clone()
    trainer = Trainer(
        task, precision=Fp16(init_scale=1024.0), progress=False, strategy="cpu", callbacks=[notes], seed=0
    )
    run = trainer.fit(pairs(steps), steps=steps)
    return run, notes, bool(torch.equal(before, model.linear.weight))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_step_whose_gradients_overflow_is_left_out_and_the_scale_is_halved():
    run, notes, unchanged = half(1e37, steps=2)
    assert (notes.steps, notes.changed, unchanged, run.progress.steps) == (
        [
            ("half-precision gradients overflowed; the loss scale is now 512", 512.0, 0.1),
            ("half-precision gradients overflowed; the loss scale is now 256", 256.0, 0.1),
        ],
        0,
        True,
        2,
    )


def test_a_step_whose_gradients_are_finite_is_taken():
    _, notes, unchanged = half(1.0, steps=2)
    assert ([step[:2] for step in notes.steps], notes.changed, unchanged) == (
        [(None, 1024.0), (None, 1024.0)],
        2,
        False,
    )


def test_the_schedulers_move_with_the_steps_that_were_taken():
    _, notes, _ = half(1.0, steps=2)
    assert [lr for _, _, lr in notes.steps] == [0.05, pytest.approx(0.1 / 3)]


def test_handlers_before_the_step_see_gradients_without_the_scale():
    class Looks(Callback):
        def on_before_optimizer_step(self, run):
            self.gradient = run.model.linear.bias.grad.item()

    def gradient(precision):
        torch.manual_seed(0)
        looks = Looks()
        trainer = Trainer(supervised(Sees()), precision=precision, progress=False, strategy="cpu", callbacks=[looks])
        trainer.fit(pairs(1), steps=1)
        return looks.gradient

    assert gradient(Fp16(init_scale=1024.0)) == pytest.approx(gradient("fp32"), rel=1e-2)


def one_scaled_step(loss_of):
    """One step of two optimizers with a scaler: what it said, who heard of it, and which of the two moved."""
    models = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    notes, before = Notes(), [model.weight.item() for model in models]
    notes.on_step_end = lambda run: None
    run = Run(
        model=models,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.1) for model in models],
        scaler=torch.amp.GradScaler("cpu"),
        callbacks=[notes],
    )
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for x in loop.batches(run, [torch.ones(2, 1)]):
                loop.backward(run, loss_of(models, x))
                said = loop.optimizer_step(run)
    return said, notes.changed, [model.weight.item() != old for model, old in zip(models, before, strict=True)]


def test_a_step_in_which_one_of_two_optimizers_overflowed_says_truly_whether_weights_changed():
    said, changed, moved = one_scaled_step(lambda models, x: models[0](x).sum() + (models[1](x) * 1e36).sum())
    assert (said, changed) == (any(moved), int(any(moved)))


def test_an_optimizer_without_gradients_is_left_alone_in_half_precision_as_in_full():
    said, changed, moved = one_scaled_step(lambda models, x: models[0](x).sum())
    assert (said, changed, moved) == (True, 1, [True, False])
