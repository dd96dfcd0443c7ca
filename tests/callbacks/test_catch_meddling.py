import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from loopline import Callback, Run, loop
from loopline.callbacks import CatchMeddling, GradientStats, Lambda, ModelSummary, PrintMetrics, ProgressBar
from loopline.core.errors import Meddling


@dataclass
class Sample:
    x: torch.Tensor
    ages: np.ndarray
    name: str


def new_model():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.1))


def new_batch():
    return {"sample": Sample(torch.ones(3, 2), np.arange(3), "a"), "list": [torch.zeros(1), 2]}


def train(*callbacks, steps=2, moment="before_optimizer_step", act=None, policy="disable"):
    """Two steps with Adam, and somebody who does something at the second of some event."""
    model = new_model()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)

    def second(run):
        if run.step == 1 and act is not None:
            act(run)

    meddler = Lambda(**{f"on_{moment}": second}, on_error=policy, careful=True)
    run = Run(model=model, optimizers=[adam], callbacks=[meddler, *callbacks])
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for batch in loop.batches(run, [new_batch() for _ in range(steps)]):
                run.batch.output = {"said": model(batch["sample"].x)}
                loop.backward(run, run.batch.output["said"].sum())
                loop.optimizer_step(run)
    return run


def weight(run):
    return run.model[0].weight


def sample(run):
    return run.batch.data["sample"]


def replace_parameter(run):
    run.model[0].weight = nn.Parameter(weight(run).detach().clone())


def replace_module(run):
    run.model[2] = nn.Identity()


def write_back(run):
    with torch.no_grad():
        weight(run).copy_(weight(run).clone())


def replace_gradient(run):
    weight(run).grad = weight(run).grad.clone()


def replace_batch(run):
    run.batch.data = dict(run.batch.data)


MEDDLING = {
    "a weight in place": (lambda run: weight(run).detach().add_(1), "0.weight"),
    "a weight through its data": (lambda run: weight(run).data.add_(1), "0.weight"),
    "a weight written as it was": (write_back, "0.weight"),
    "another parameter": (replace_parameter, "0.weight (another object)"),
    "a frozen weight": (lambda run: weight(run).requires_grad_(False), "0.weight.requires_grad (True -> False)"),
    "a buffer": (lambda run: run.model[1].running_mean.zero_(), "1.running_mean"),
    "a gradient in place": (lambda run: weight(run).grad.mul_(2), "0.weight.grad"),
    "a gradient through its data": (lambda run: weight(run).grad.data.add_(1), "0.weight.grad"),
    "another gradient": (replace_gradient, "0.weight.grad (another object)"),
    "no gradient": (lambda run: setattr(weight(run), "grad", None), "0.weight.grad (another object)"),
    "a mode": (lambda run: run.model[2].eval(), "the mode of 2 (train -> eval)"),
    "another module": (replace_module, "module 2 (another object)"),
    "another batch": (replace_batch, "run.batch.data (another object)"),
    "the batch's tensor": (lambda run: sample(run).x.mul_(2), "run.batch.data['sample'].x"),
    "the batch's array": (lambda run: sample(run).ages.__imul__(2), "run.batch.data['sample'].ages"),
    "the batch's text": (lambda run: setattr(sample(run), "name", "b"), "run.batch.data['sample'].name (a -> b)"),
    "the batch's list": (lambda run: run.batch.data["list"].append(3), "run.batch.data['list'][2] (new)"),
    "less in the batch": (lambda run: run.batch.data["list"].pop(), "run.batch.data['list'][1] (gone)"),
    "the output": (
        lambda run: run.batch.output.update(said=torch.ones(1)),
        "run.batch.output['said'] (another object)",
    ),
    "the loss": (lambda run: setattr(run.batch, "loss", torch.ones(1)), "run.batch.loss (another object)"),
    "a learning rate": (
        lambda run: run.optimizers[0].param_groups[0].update(lr=0.5),
        "run.optimizers[0].param_groups[0]['lr'] (0.1 -> 0.5)",
    ),
    "an optimizer's state": (
        lambda run: run.optimizers[0].state[weight(run)]["exp_avg"].zero_(),
        "run.optimizers[0].state[0.weight]['exp_avg']",
    ),
    "an optimizer's parameters": (
        lambda run: run.optimizers[0].param_groups[0]["params"].pop(),
        "run.optimizers[0].param_groups[0]['params'][3] (gone)",
    ),
    "torch's stream": (lambda run: torch.rand(1), "the random stream cpu"),
    "numpy's stream": (lambda run: np.random.normal(), "the random stream numpy"),
}


@pytest.mark.parametrize("what", MEDDLING)
def test_what_an_observer_changed_is_named(what):
    act, named = MEDDLING[what]
    with pytest.raises(Meddling) as caught:
        train(CatchMeddling(), act=act)
    said = str(caught.value).split(" at before_optimizer_step, epoch 0, step 1. ")[0]
    assert said.startswith(f"Lambda changed {named}"), said


@pytest.mark.parametrize("what", [what for what in MEDDLING if what != "another module"])
def test_without_it_nobody_notices(what):
    act, _ = MEDDLING[what]
    assert train(act=act).status == "completed"


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_who_may_steer_may_do_so(policy):
    assert train(CatchMeddling(), act=MEDDLING["a weight in place"][0], policy=policy).status == "completed"


def test_looking_is_no_meddling(tmp_path):
    def looks(run):
        list(run.model.state_dict())
        weight(run).detach().clone().add_(1)
        for x in loop.evaluate(run, [torch.ones(2, 2)]):
            run.model(x)

    said = []
    seen = [GradientStats(), ModelSummary(write=said.append), PrintMetrics(write=said.append), ProgressBar()]
    assert train(CatchMeddling(), *seen, act=looks).status == "completed"


def test_in_a_new_process_the_observers_that_come_with_loopline_keep_what_they_promise(tmp_path):
    """What they import when they are first needed must not draw either."""
    code = """
import sys
from loopline import Every, Trainer
from loopline.callbacks import CatchMeddling, GradientStats, ModelSummary, PrintMetrics, Strict
from loopline.sinks import ConsoleSink, CsvSink, JsonlSink
from loopline.testing import TinyTask, tiny_loader

assert "rich.style" not in sys.modules
each = Every(steps=1)
seen = [GradientStats(each), ModelSummary(), PrintMetrics(each), CatchMeddling(), Strict()]
sinks = [ConsoleSink(when=each), CsvSink("metrics.csv", when=each), JsonlSink("metrics.jsonl", when=each)]
run = Trainer(TinyTask(), callbacks=seen, sinks=sinks).fit(tiny_loader(), tiny_loader(), epochs=2)
assert "rich.style" in sys.modules
print(run.status)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["completed"]), ended.stderr


def test_a_run_is_the_same_with_it():
    torch.manual_seed(0)
    without = train(Lambda(on_step_end=lambda run: None, on_error="disable"))
    torch.manual_seed(0)
    looked_at = train(Lambda(on_step_end=lambda run: None, on_error="disable"), CatchMeddling())
    weights = [{name: value.tolist() for name, value in run.model.state_dict().items()} for run in (without, looked_at)]
    assert weights[0] == weights[1]


def test_who_meddles_and_then_fails_is_caught_as_well():
    def fails(run):
        weight(run).data.zero_()
        raise OSError("and then")

    with pytest.raises(Meddling, match=r"0\.weight") as caught:
        train(CatchMeddling(), act=fails)
    assert repr(caught.value.__cause__) == "OSError('and then')"


def test_meddling_at_the_end_is_an_error_too():
    with pytest.raises(ExceptionGroup) as caught:
        train(CatchMeddling(), moment="teardown", act=MEDDLING["a weight in place"][0])
    assert [type(error) for error in caught.value.exceptions] == [Meddling]


def test_of_many_changes_a_few_are_named():
    def zero(run):
        for parameter in run.model.parameters():
            parameter.data.zero_()
            parameter.grad.data.fill_(7)

    with pytest.raises(Meddling, match=r"^Lambda changed (0|1)\..* and 3 more at"):
        train(CatchMeddling(), act=zero)


class Meddler(Callback):
    on_error = "disable"

    def on_step_end(self, run):
        for parameter in run.optimizers[0].param_groups[0]["params"]:
            parameter.data.zero_()


def test_a_run_without_a_module_is_looked_at_through_its_optimizers():
    parameter = nn.Parameter(torch.ones(1))
    run = Run(optimizers=[torch.optim.SGD([parameter])], callbacks=[Meddler(), CatchMeddling()])
    said = r"^Meddler changed run\.optimizers\[0\]\.param_groups\[0\]\['params'\]\[0\] at step_end"
    with pytest.raises(Meddling, match=said), loop.fit(run):  # noqa: PT012
        for _ in loop.epochs(run, 1):
            for _ in loop.batches(run, [1]):
                pass


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(0),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, 2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.ones(2, 3).t(),
        torch.ones(1).expand(4),
        nn.UninitializedBuffer(),
        torch.inference_mode()(torch.ones)(2),
    ],
    ids=lambda tensor: f"{tensor.dtype}".removeprefix("torch."),
)
def test_every_kind_of_tensor_can_be_looked_at(tensor):
    run = Run(callbacks=[Lambda(on_batch_start=lambda run: None, on_error="disable"), CatchMeddling()])
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for _ in loop.batches(run, [[torch.ones(1), tensor]]):
                pass
    assert run.status == "completed"
