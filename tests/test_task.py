"""Tasks: supervised ones, ones of the user's own, manual ones, compiled ones."""

import contextlib
import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from loopline import At, Callback, Every, Fp16, Never, Run, Scheduled, SupervisedTask, Task, Trainer, When, loop
from loopline.core.errors import BadStep, LooplineError, MissingMetric

WORDS = 5


def a_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def supervised(model=None, **given):
    model = model or a_model()
    return SupervisedTask(model, **{"loss": nn.functional.mse_loss, "optimizer": sgd(model), **given})


def pairs(count=4, size=2):
    torch.manual_seed(1)
    inputs = torch.randn(count, size, 2)
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def trainer(task, **given):
    return Trainer(task, **{"progress": False, "strategy": "cpu", **given})


class Rates(Callback):
    """The learning rates after each step, or after each epoch as the next one begins."""

    def __init__(self, optimizer=0):
        self.optimizer, self.steps, self.epochs = optimizer, [], []

    def rate(self, run):
        return run.optimizers[self.optimizer].param_groups[0]["lr"]

    def on_step_end(self, run):
        self.steps.append(self.rate(run))

    def on_epoch_start(self, run):
        self.epochs.append(self.rate(run))


def halves(optimizer):
    return LambdaLR(optimizer, lambda n: 0.5**n)


def test_a_supervised_task_learns():
    run = trainer(supervised()).fit(pairs(16), epochs=20)
    assert (run.status, run.metrics["train/loss"] < 0.1) == ("completed", True)


def test_its_losses_are_means_over_samples():
    task, batches = supervised(), [*pairs(1, size=6), *pairs(1, size=2)]
    with torch.no_grad():
        exact = sum(float(task.loss(task.model(x), y)) * len(x) for x, y in batches) / 8
    assert trainer(task).validate(batches) == {"val/loss": pytest.approx(exact, rel=1e-6)}


@pytest.mark.parametrize("batch", [torch.ones(2, 2), (torch.ones(2, 2),), {"x": torch.ones(2, 2)}, [1, 2, 3]])
def test_batches_that_are_no_pairs_are_an_error_that_says_what_they_are(batch):
    size = f" of {len(batch)} items" if isinstance(batch, tuple | list | dict) else ""
    with pytest.raises(BadStep) as caught:
        trainer(supervised()).fit([batch], epochs=1)
    assert str(caught.value) == (
        f"SupervisedTask wants batches of (input, target); this loader gives a {type(batch).__name__}{size}. "
        "Change the loader, or write a Task whose train_step knows your batches."
    )


@pytest.mark.parametrize("metric", ["accuracy", None, 3])
def test_a_metric_that_can_neither_be_called_nor_updated_is_refused_at_once(metric):
    with pytest.raises(TypeError) as caught:
        supervised(metrics={"accuracy": metric})
    assert str(caught.value) == (
        f"metrics['accuracy'] is {metric!r}: give a function of (output, target), or an object with update, compute "
        "and reset."
    )


@pytest.mark.parametrize("name", ["loss", "output", "target", "weight"])
def test_a_metric_under_a_name_that_means_something_else_is_refused_at_once(name):
    with pytest.raises(ValueError, match=name):
        supervised(metrics={name: lambda output, target: 1.0})


@pytest.mark.parametrize("wrong", [5, "cosine", halves])
def test_a_scheduler_that_is_none_is_refused_at_once(wrong):
    with pytest.raises(TypeError, match=r"^scheduler is .*: give a torch scheduler, or Scheduled\("):
        supervised(scheduler=wrong)


@pytest.mark.parametrize("kind", [float, torch.tensor, np.float32, np.float64, lambda x: torch.tensor([x])])
def test_a_metric_function_is_averaged_over_samples(kind):
    task = supervised(metrics={"size": lambda output, target: kind(float(len(target)))})
    said = trainer(task).validate([*pairs(1, size=6), *pairs(1, size=2)])
    assert said.get("val/size") == 5.0


def test_a_metric_function_that_gives_many_numbers_is_an_error_that_names_it():
    task = supervised(metrics={"error": lambda output, target: (output - target).abs().squeeze(1)})
    with pytest.raises((BadStep, TypeError), match="error"):
        trainer(task).validate(pairs())


class MaxError:
    """A metric with a state, as torchmetrics has them."""

    def __init__(self):
        self.worst = torch.tensor(0.0)

    def update(self, output, target):
        self.worst = torch.maximum(self.worst, (output - target).abs().max())

    def compute(self):
        return self.worst

    def reset(self):
        self.worst = torch.tensor(0.0)


def test_a_metric_with_a_state_begins_anew_in_every_evaluation():
    task = supervised(metrics={"worst": MaxError()})
    measured, batches = trainer(task), pairs()
    with torch.no_grad():
        exact = max(float((task.model(x) - y).abs().max()) for x, y in batches)
    far = [(x, y + 100) for x, y in batches]
    said = [measured.validate(loader)["val/worst"] for loader in (batches, far, batches)]
    assert (said[0], said[2], said[1] > 90) == (pytest.approx(exact), pytest.approx(exact), True)


def test_metrics_are_measured_in_every_epoch_of_a_fit():
    seen = []

    class Notes(Callback):
        def on_epoch_end(self, run):
            seen.append({name: run.metrics[name] for name in run.metrics.fresh("val")})

    task = supervised(metrics={"worst": MaxError(), "size": lambda output, target: float(len(target))})
    trainer(task, callbacks=[Notes()]).fit(pairs(), pairs(), epochs=2)
    assert [sorted(epoch) for epoch in seen] == [["val/loss", "val/size", "val/worst"]] * 2


def test_a_bare_scheduler_moves_at_the_end_of_an_epoch():
    task, rates = supervised(), Rates()
    task.scheduler = halves(task.optimizer)
    trainer(task, callbacks=[rates]).fit(pairs(2), epochs=3)
    assert (rates.epochs, rates.steps) == ([0.1, 0.05, 0.025], [0.1, 0.1, 0.05, 0.05, 0.025, 0.025])


def test_a_scheduler_moves_when_it_is_told_to():
    task, rates = supervised(), Rates()
    task.scheduler = Scheduled(scheduler=halves(task.optimizer), when=Every(steps=2))
    trainer(task, callbacks=[rates]).fit(pairs(3), epochs=2)
    assert rates.steps == [0.1, 0.05, 0.05, 0.025, 0.025, 0.0125]


def test_a_scheduler_may_move_at_given_counts_only():
    task, rates = supervised(), Rates()
    task.scheduler = Scheduled(scheduler=halves(task.optimizer), when=At(steps=[1], epochs=[2]))
    trainer(task, callbacks=[rates]).fit(pairs(2), epochs=3)
    assert (rates.steps, rates.epochs) == ([0.05, 0.05, 0.05, 0.05, 0.025, 0.025], [0.1, 0.05, 0.025])


def test_several_schedulers_move_on_their_own():
    task, rates = supervised(), Rates()
    task.scheduler = [
        Scheduled(scheduler=LambdaLR(task.optimizer, lambda n: 1.0), when=Never()),
        Scheduled(scheduler=halves(task.optimizer), when=Every(epochs=2)),
    ]
    trainer(task, callbacks=[rates]).fit(pairs(1), epochs=4)
    assert rates.epochs == [0.1, 0.1, 0.05, 0.05]


class Given:
    """A scheduler that writes down what it is given."""

    def __init__(self):
        self.given = []

    def step(self, *values):
        self.given.append(values)


def test_a_plateau_is_given_the_metric_of_the_evaluation_of_its_epoch():
    task, given, losses = supervised(), Given(), []
    task.scheduler = Scheduled(scheduler=given, when=Every(epochs=1), metric="val/loss")

    class Notes(Callback):
        def on_epoch_end(self, run):
            losses.append((run.metrics["val/loss"],))

    trainer(task, callbacks=[Notes()]).fit(pairs(), pairs(), epochs=3)
    assert (given.given == losses, len(set(losses))) == (True, 3)


def test_a_plateau_waits_where_an_epoch_had_no_evaluation():
    task, given = supervised(), Given()
    task.scheduler = Scheduled(scheduler=given, when=Every(epochs=1), metric="val/loss")
    trainer(task, evaluate=Every(epochs=2)).fit(pairs(), pairs(), epochs=5)
    assert len(given.given) == 2


def test_torchs_plateau_watches_the_validation_loss_unasked():
    task, rates = supervised(), Rates()
    task.scheduler = ReduceLROnPlateau(task.optimizer, patience=0, threshold=10.0, threshold_mode="abs")
    trainer(task, callbacks=[rates]).fit(pairs(), pairs(), epochs=3)
    assert rates.epochs == [0.1, 0.1, pytest.approx(0.01)]


def test_a_plateau_without_validation_is_an_error_before_anything_is_trained():
    task = supervised()
    task.scheduler = ReduceLROnPlateau(task.optimizer)
    before = [p.detach().clone() for p in task.model.parameters()]
    with pytest.raises(LooplineError, match="val/loss"):
        trainer(task).fit(pairs(), epochs=2)
    assert all(torch.equal(one, other) for one, other in zip(before, task.model.parameters(), strict=True))


def test_a_plateau_whose_metric_nobody_logs_is_an_error_that_names_the_nearest():
    task = supervised()
    task.scheduler = Scheduled(scheduler=Given(), when=Every(epochs=1), metric="val/los")
    with pytest.raises(MissingMetric, match="Did you mean 'val/loss'"):
        trainer(task).fit(pairs(), pairs(), epochs=1)


def test_a_scheduler_with_no_when_is_refused_at_once():
    with pytest.raises((TypeError, ValueError), match="when"):
        Scheduled(scheduler=Given(), when=5)


class Tokens(Task):
    """A language model of five words: a batch counts by its tokens, which are not padding."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Embedding(WORDS, WORDS)
        self.optimizer = sgd(self.model, lr=1.0)

    def optimizers(self):
        return self.optimizer

    def train_step(self, batch, run):
        words, mask = batch
        losses = nn.functional.cross_entropy(self.model(words).transpose(1, 2), words, reduction="none")
        return {"loss": (losses * mask).sum() / mask.sum(), "weight": mask.sum()}

    def eval_step(self, batch, run):
        return self.train_step(batch, run)


def sentences(lengths=(7, 1, 4, 2)):
    words = torch.arange(8).remainder(WORDS).reshape(1, 8)
    return [(words, (torch.arange(8) < n).float().reshape(1, 8)) for n in lengths]


def joined(batches):
    return [tuple(torch.cat(parts) for parts in zip(*batches, strict=True))]


def test_a_window_weighted_by_tokens_steps_like_the_one_big_batch():
    small, big = Tokens(), Tokens()
    trainer(small, accumulate=4).fit(sentences(), epochs=1)
    trainer(big).fit(joined(sentences()), epochs=1)
    torch.testing.assert_close(small.model.weight, big.model.weight)


def test_a_loss_weighted_by_tokens_is_logged_like_that_of_the_one_big_batch():
    small, big = trainer(Tokens()).validate(sentences()), trainer(Tokens()).validate(joined(sentences()))
    assert small == {"val/loss": pytest.approx(big["val/loss"])}


def test_a_window_that_weighs_nothing_is_skipped():
    task, skipped = Tokens(), []

    class Notes(Callback):
        def on_step_end(self, run):
            skipped.append(run.skipped)

    class PlainWeights(Tokens):
        def train_step(self, batch, run):
            words, _ = batch
            return {"loss": self.model(words).sum(), "weight": 0}

    task = PlainWeights()
    before = task.model.weight.detach().clone()
    trainer(task, accumulate=2, callbacks=[Notes()]).fit(sentences(), epochs=1)
    assert (skipped, torch.equal(before, task.model.weight)) == (["the weights of this window add up to 0"] * 2, True)


def test_a_loss_in_a_tensor_of_one_number_is_logged_whatever_its_shape():
    class Shaped(Tokens):
        def train_step(self, batch, run):
            return {"loss": super().train_step(batch, run)["loss"].reshape(1)}

    run = trainer(Shaped()).fit(sentences(), epochs=1)
    assert "train/loss" in run.metrics


def test_other_scalars_of_a_step_are_logged_and_the_rest_can_be_read():
    class Says(Tokens):
        def train_step(self, batch, run):
            return {**super().train_step(batch, run), "half": 0.5, "logits": self.model.weight, "note": "a"}

    outputs = []

    class Reads(Callback):
        def on_batch_end(self, run):
            outputs.append(sorted(run.batch.output))

    run = trainer(Says(), callbacks=[Reads()]).fit(sentences(), epochs=1)
    assert (sorted(run.metrics), outputs) == (
        ["train/half", "train/loss"],
        [["half", "logits", "loss", "note", "weight"]] * 4,
    )


def test_a_step_may_return_the_loss_alone():
    class Bare(Tokens):
        def train_step(self, batch, run):
            return super().train_step(batch, run)["loss"]

    assert sorted(trainer(Bare()).fit(sentences(), epochs=1).metrics) == ["train/loss"]


def test_a_mapping_without_a_loss_is_an_error_that_says_what_it_has():
    class Lossless(Tokens):
        def train_step(self, batch, run):
            return {"los": 1.0, "other": 2.0}

    with pytest.raises(BadStep) as caught:
        trainer(Lossless()).fit(sentences(), epochs=1)
    assert str(caught.value).endswith(
        "train_step returned a mapping without \"loss\" (it has 'los', 'other'). Return {\"loss\": loss, ...}."
    )


def test_an_evaluation_that_returns_no_mapping_is_an_error():
    class Bare(Tokens):
        def eval_step(self, batch, run):
            return torch.tensor(1.0)

    Bare.__qualname__ = "Bare"
    with pytest.raises(BadStep, match=r"^Bare\.eval_step returned Tensor; it returns a mapping of names to values"):
        trainer(Bare()).validate(sentences())


@pytest.mark.parametrize(
    ("method", "use"),
    [
        ("optimizers()", lambda task: trainer(task).fit([1], epochs=1)),
        ("eval_step(batch, run)", lambda task: trainer(task).validate([1])),
        ("predict_step(batch, run)", lambda task: trainer(task).predict([1])),
    ],
)
def test_a_method_that_was_not_written_is_named(method, use):
    class Bare(Task):
        model = nn.Linear(1, 1)

    Bare.__qualname__ = "Bare"
    with pytest.raises(NotImplementedError) as caught:
        use(Bare())
    assert str(caught.value).startswith(f"Bare has no {method}")


@pytest.mark.parametrize("given", [None, [], [5], "adam"])
def test_what_is_no_optimizer_is_an_error_that_shows_it(given):
    class Wrong(Tokens):
        def optimizers(self):
            return given

    with pytest.raises(TypeError, match=r"optimizers\(\) gave .*: return a torch optimizer, or a list\."):
        trainer(Wrong()).fit(sentences(), epochs=1)


@pytest.mark.parametrize("several", [True, False], ids=["in a list", "alone"])
def test_a_torch_scheduler_in_a_task_of_ones_own_is_taken_or_refused_with_a_sentence(several):
    class Bare(Tokens):
        def schedulers(self):
            scheduler = halves(self.optimizer)
            return [scheduler] if several else scheduler

    task, rates = Bare(), Rates()
    try:
        trainer(task, callbacks=[rates]).fit(sentences(), epochs=2)
    except TypeError as error:
        assert "Scheduled" in str(error)  # noqa: PT017 - refusing it is as good as taking it
    else:
        assert rates.epochs == [1.0, 0.5]


class Gan(Task):
    """A generator of numbers around 3, and a discriminator that steps before it."""

    manual = True

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"makes": nn.Linear(1, 1), "judges": nn.Sequential(nn.Linear(1, 8), nn.Tanh())})
        self.model["judges"].append(nn.Linear(8, 1))
        self.makes = torch.optim.Adam(self.model["makes"].parameters(), lr=0.05)
        self.judges = torch.optim.Adam(self.model["judges"].parameters(), lr=0.05)

    def optimizers(self):
        return [self.makes, self.judges]

    def train_step(self, batch, run):
        verdict = nn.functional.binary_cross_entropy_with_logits
        made, ones = self.model["makes"](torch.randn_like(batch)), torch.ones_like(batch)
        judges, judge = self.judges, self.model["judges"]
        judges.zero_grad()
        seen_through = verdict(judge(batch), ones) + verdict(judge(made.detach()), 0 * ones)
        loop.backward(run, seen_through)
        judges.step()
        self.makes.zero_grad()
        fooled = verdict(judge(made), ones)
        loop.backward(run, fooled)
        self.makes.step()
        return {"judges": seen_through, "makes": fooled}


def numbers_around(center, count=60):
    torch.manual_seed(1)
    return [center + 0.1 * torch.randn(32, 1) for _ in range(count)]


def test_two_optimizers_of_a_manual_task_train_against_each_other():
    task = Gan()
    run = trainer(task).fit(numbers_around(3.0), epochs=1)
    made = task.model["makes"](torch.randn(256, 1)).mean().item()
    assert (run.status, sorted(run.metrics), run.progress.steps, abs(made - 3.0) < 1.5) == (
        "completed",
        ["train/judges", "train/makes"],
        60,
        True,
    )


def test_a_manual_task_may_return_nothing():
    class Silent(Gan):
        def train_step(self, batch, run):
            super().train_step(batch, run)

    assert dict(trainer(Silent()).fit(numbers_around(3.0, 2), epochs=1).metrics) == {}


def test_a_manual_task_hears_its_backward_passes():
    heard = []

    class Notes(Callback):
        def on_after_backward(self, run):
            heard.append(run.batch.index)

    trainer(Gan(), callbacks=[Notes()]).fit(numbers_around(3.0, 2), epochs=1)
    assert heard == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "given",
    [{"accumulate": 2}, {"clip_norm": 1.0}, {"precision": "fp16"}, {"precision": Fp16()}],
    ids=lambda value: next(iter(value)),
)
def test_what_a_trainer_cannot_do_for_a_manual_task_is_refused_at_once(given):
    with pytest.raises(ValueError, match="manual"):
        trainer(Gan(), **given)


def test_the_schedulers_of_a_manual_task_move_with_its_steps():
    class Slows(Gan):
        def schedulers(self):
            return [Scheduled(scheduler=halves(self.judges), when=Every(steps=1))]

    rates = Rates(optimizer=1)
    trainer(Slows(), callbacks=[rates]).fit(numbers_around(3.0, 3), epochs=1)
    assert rates.steps == [0.025, 0.0125, 0.00625]


def test_two_optimizers_of_a_task_that_is_not_manual_both_step_with_their_schedulers():
    class Two(Task):
        def __init__(self):
            self.model = a_model()
            self.first, self.last = sgd(self.model[0]), sgd(self.model[2])

        def optimizers(self):
            return self.first, self.last

        def schedulers(self):
            return [
                Scheduled(scheduler=halves(self.first), when=Every(steps=1)),
                Scheduled(scheduler=halves(self.last), when=Every(epochs=1)),
            ]

        def train_step(self, batch, run):
            return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    task, first, last = Two(), Rates(0), Rates(1)
    before = [p.detach().clone() for p in task.model.parameters()]
    trainer(task, callbacks=[first, last]).fit(pairs(2), epochs=2)
    moved = [not torch.equal(one, other) for one, other in zip(before, task.model.parameters(), strict=True)]
    assert (moved, first.steps, last.epochs) == ([True] * 4, [0.05, 0.025, 0.0125, 0.00625], [0.1, 0.05])


@pytest.mark.parametrize("stopped", ["interrupted", "by StopRun"])
def test_going_on_after_a_run_that_ended_inside_a_step_says_so(caplog, stopped):
    from loopline import StopRun

    class Breaks(Callback):
        def on_after_backward(self, run):
            raise KeyboardInterrupt if stopped == "interrupted" else StopRun("now")

    first = trainer(supervised(), callbacks=[Breaks()])
    with contextlib.suppress(KeyboardInterrupt):
        first.fit(pairs(), epochs=1)
    with caplog.at_level(logging.WARNING, "loopline"):
        trainer(supervised()).fit(pairs(), epochs=1, resume=first.run)
    assert len(caplog.records) == 1


def test_an_evaluation_that_was_just_made_is_not_made_again():
    at_steps = []

    class Notes(Callback):
        def on_eval_end(self, run):
            at_steps.append(run.progress.steps)

    trainer(supervised(), evaluate=Every(steps=2), sanity=0, callbacks=[Notes()]).fit(pairs(6), pairs(), steps=4)
    assert at_steps == [2, 4]


def test_what_is_never_to_be_evaluated_is_not_evaluated():
    at_steps = []

    class Notes(Callback):
        def on_eval_end(self, run):
            at_steps.append(run.progress.steps)

    trainer(supervised(), evaluate=Never(), sanity=0, callbacks=[Notes()]).fit(pairs(6), pairs(), steps=4)
    assert at_steps == []


def test_a_policy_of_ones_own_says_when_to_evaluate():
    at_steps = []

    class EvenEpochs(When):
        def watch(self):
            return lambda unit, count: unit == "epochs" and count % 2 == 0

    class Notes(Callback):
        def on_eval_end(self, run):
            at_steps.append(run.progress.steps)

    trainer(supervised(), evaluate=EvenEpochs(), sanity=0, callbacks=[Notes()]).fit(pairs(1), pairs(), epochs=4)
    assert at_steps == [2, 4]


def test_callbacks_may_come_from_a_generator_or_are_refused():
    rates = Rates()
    try:
        trainer(supervised(), callbacks=(given for given in [rates])).fit(pairs(2), epochs=1)
    except TypeError:
        return
    assert rates.steps == [0.1, 0.1]


def test_a_value_that_is_a_number_only_later_is_logged_from_then_on():
    class Later(Tokens):
        def train_step(self, batch, run):
            said = super().train_step(batch, run)
            return {**said, "extra": None if run.step == 0 else 2.0}

    assert "train/extra" in trainer(Later()).fit(sentences(), epochs=1).metrics


def test_going_on_does_not_change_what_the_earlier_run_came_to():
    task = supervised()
    earlier = trainer(task).fit(pairs(), epochs=1)
    before = dict(earlier.metrics)
    trainer(task).fit(pairs(), epochs=2, resume=earlier)
    assert dict(earlier.metrics) == before


def test_going_on_with_a_seed_does_not_draw_the_same_numbers_again():
    class Draws(Callback):
        def __init__(self):
            self.drawn = []

        def on_step_end(self, run):
            self.drawn.append(torch.rand(1).item())

    draws = Draws()
    seeded = trainer(supervised(), seed=1, callbacks=[draws])
    earlier = seeded.fit(pairs(2), epochs=1)
    seeded.fit(pairs(2), epochs=2, resume=earlier)
    assert len(set(draws.drawn)) == 4


class Listens(Callback):
    """Hears the seams between which a compiled model runs."""

    def __init__(self):
        self.heard, self.shapes = [], []

    def on_loss_ready(self, run):
        self.heard.append("loss_ready")

    def on_batch_end(self, run):
        self.heard.append("batch_end")
        self.shapes.append(tuple(run.batch.output["output"].shape))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's own, at the first import of its compiler
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_trains_like_the_plain_one_and_its_callbacks_hear_all(backend):
    torch._dynamo.reset()
    plain, compiled = a_model(), a_model()
    listens = Listens()
    expected = trainer(supervised(plain)).fit(pairs(), pairs(), epochs=2)
    task = supervised(torch.compile(compiled, backend=backend))
    run = trainer(task, callbacks=[listens]).fit(pairs(), pairs(), epochs=2)
    torch.testing.assert_close(dict(run.metrics), dict(expected.metrics))
    torch.testing.assert_close(list(compiled.parameters()), list(plain.parameters()))
    assert (listens.heard, set(listens.shapes)) == (["loss_ready", "batch_end"] * 8, {(2, 1)})


def test_a_run_is_given_to_every_step():
    given = []

    class Asks(Tokens):
        def train_step(self, batch, run):
            given.append((type(run), run.stage, run.in_batch))
            return super().train_step(batch, run)

    trainer(Asks()).fit(sentences((3,)), sentences((3,)), epochs=1)
    assert given == [(Run, "sanity", True), (Run, "train", True), (Run, "val", True)]


@pytest.mark.parametrize("wrong", [5, Every, None, "epochs=1"])
def test_what_is_no_policy_is_refused_at_once(wrong):
    with pytest.raises(TypeError, match=r"^Trainer\(evaluate=.*\): say when, for example Every\(epochs=1\)"):
        trainer(supervised(), evaluate=wrong)


@pytest.mark.parametrize("wrong", [a_model(), None, SupervisedTask], ids=["a model", "nothing", "the class"])
def test_what_is_no_task_is_refused_at_once(wrong):
    with pytest.raises(
        TypeError, match=r"the first argument is a Task\. For a model with a loss and an optimizer, give"
    ):
        trainer(wrong)


def test_a_model_without_anything_to_train_is_an_error_that_says_what_can_be_done_with_it():
    task = supervised()
    for parameter in task.model.parameters():
        parameter.requires_grad = False
    with pytest.raises(BadStep, match=r"nothing to train\. To measure it as it is, call validate or test\.$"):
        trainer(task).fit(pairs(), epochs=1)
