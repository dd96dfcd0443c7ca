import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR

from loopline import Callback, Every, Run, Scheduled, Task, Trainer, loop
from loopline.callbacks import Lambda, LRMonitor
from loopline.testing import no_sync, tiny_loader


def seen_at(event, monitor, optimizers, *, batches=3, schedulers=(), accumulate=1, quietly=False, others=()):
    """The learning rates and momenta among the metrics, each time the event passes."""
    seen = []

    def see(run):
        seen.append({name: run.metrics.entry(name) for name in run.metrics.fresh("train")})

    parameters = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    run = Run(
        optimizers=optimizers,
        schedulers=schedulers,
        # the reader is attached first: what it reads decides that it comes last
        callbacks=[Lambda(**{event: see}, reads={"metrics"}), monitor, *others],
    )
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for _ in loop.batches(run, [1] * batches, accumulate=accumulate):
                loss = sum(parameter.sum() for parameter in parameters)
                if quietly:
                    with no_sync():
                        loop.backward(run, loss)
                        loop.optimizer_step(run)
                else:
                    loop.backward(run, loss)
                    loop.optimizer_step(run)
    return seen


def parameter():
    return torch.nn.Parameter(torch.zeros(1))


def test_the_rate_is_the_one_that_the_step_was_taken_with():
    sgd = SGD([parameter()], lr=1.0)
    halving = Scheduled(scheduler=ExponentialLR(sgd, 0.5), when=Every(steps=1))
    seen = seen_at("on_step_end", LRMonitor(), [sgd], schedulers=[halving])
    assert (seen, sgd.param_groups[0]["lr"]) == ([{"train/lr": 1.0}, {"train/lr": 0.5}, {"train/lr": 0.25}], 0.125)


def test_the_epochs_value_is_the_last_steps_and_not_a_mean():
    sgd = SGD([parameter()], lr=1.0)
    halving = Scheduled(scheduler=ExponentialLR(sgd, 0.5), when=Every(steps=1))
    assert seen_at("on_epoch_end", LRMonitor(), [sgd], schedulers=[halving]) == [{"train/lr": 0.25}]


def test_several_groups_are_told_apart_by_place_and_by_name():
    one = SGD([{"params": [parameter()], "lr": 0.1, "name": "body"}, {"params": [parameter()], "lr": 0.2}])
    two = SGD([parameter()], lr=0.3)
    assert seen_at("on_epoch_end", LRMonitor(), [one, two]) == [
        {"train/lr/0/body": 0.1, "train/lr/0/1": 0.2, "train/lr/1/0": 0.3}
    ]


def test_a_name_that_two_groups_share_is_not_used():
    groups = [{"params": [parameter()], "lr": lr, "name": "same"} for lr in (0.1, 0.2)]
    assert seen_at("on_epoch_end", LRMonitor(), [SGD(groups)]) == [{"train/lr/0/0": 0.1, "train/lr/0/1": 0.2}]


def test_momentum_is_noted_on_request():
    optimizers = [SGD([parameter()], lr=0.1, momentum=0.9), Adam([parameter()], lr=0.2, betas=(0.8, 0.99))]
    assert seen_at("on_epoch_end", LRMonitor(momentum=True), optimizers) == [
        {"train/lr/0/0": 0.1, "train/momentum/0/0": 0.9, "train/lr/1/0": 0.2, "train/momentum/1/0": 0.8}
    ]


def test_a_group_that_is_added_while_training_is_noted_from_then_on():
    sgd = SGD([parameter()], lr=0.1)

    class Unfreeze(Callback):
        def on_batch_start(self, run):
            if run.step == 1:
                sgd.add_param_group({"params": [parameter()], "lr": 0.2})

    assert seen_at("on_step_end", LRMonitor(), [sgd], others=[Unfreeze()]) == [
        {"train/lr": 0.1},
        {"train/lr/0/0": 0.1, "train/lr/0/1": 0.2},
        {"train/lr/0/0": 0.1, "train/lr/0/1": 0.2},
    ]


def test_a_rate_that_is_a_tensor_is_copied_and_never_read():
    sgd = SGD([parameter()], lr=torch.tensor(1.0), foreach=True)
    moved = Lambda(on_after_optimizer_step=lambda run: sgd.param_groups[0]["lr"].mul_(0.5))
    seen = seen_at("on_step_end", LRMonitor(), [sgd], others=[moved], quietly=True)
    assert [value["train/lr"].item() for value in seen] == [1.0, 0.5, 0.25]


def test_who_writes_the_rate_before_the_step_is_heard():
    sgd = SGD([parameter()], lr=1.0)

    def warm_up(run):
        sgd.param_groups[0]["lr"] = 0.1 * (run.step + 1)

    seen = seen_at("on_step_end", LRMonitor(), [sgd], others=[Lambda(on_before_optimizer_step=warm_up, writes={"lr"})])
    assert [round(value["train/lr"], 3) for value in seen] == [0.1, 0.2, 0.3]


def test_a_window_of_several_batches_is_one_step():
    sgd = SGD([parameter()], lr=1.0)
    halving = Scheduled(scheduler=ExponentialLR(sgd, 0.5), when=Every(steps=1))
    seen = seen_at("on_batch_end", LRMonitor(), [sgd], schedulers=[halving], batches=4, accumulate=2)
    assert seen == [{}, {"train/lr": 1.0}, {"train/lr": 1.0}, {"train/lr": 0.5}]


def test_a_task_that_steps_its_optimizers_itself_has_its_rates_noted_too():
    class Manual(Task):
        manual = True

        def __init__(self):
            self.model = torch.nn.Linear(4, 1)
            self.sgd = SGD(self.model.parameters(), lr=0.5)

        def optimizers(self):
            return self.sgd

        def train_step(self, batch, run):
            loop.backward(run, self.model(batch[0]).mean())
            self.sgd.step()

    seen = []
    see = Lambda(on_step_end=lambda run: seen.append(run.metrics.get("train/lr")), reads={"metrics"})
    Trainer(Manual(), callbacks=[see, LRMonitor()], progress=False).fit(tiny_loader(batches=2), epochs=1)
    assert seen == [0.5, 0.5]
