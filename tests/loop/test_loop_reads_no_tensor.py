"""Nothing between the first and the last step waits for the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from loopline import Callback, Every, Run, Scheduled, SupervisedTask, Trainer, loop
from loopline.testing import SyncFound, TinyTask, no_sync, tiny_loader, tiny_stream


def accuracy(output, target):
    return (output.argmax(dim=1) == target).float().mean()


def task():
    model = TinyTask().model
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = Scheduled(scheduler=ExponentialLR(optimizer, 0.9), when=Every(steps=1))
    return SupervisedTask(
        model, loss=nn.CrossEntropyLoss(), optimizer=optimizer, scheduler=scheduler, metrics={"accuracy": accuracy}
    )


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("loader", [tiny_loader, tiny_stream])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_fit_reads_no_tensor(accumulate, loader, clip_norm):
    trainer = Trainer(
        task(), accumulate=accumulate, clip_norm=clip_norm, evaluate=Every(steps=2) | Every(epochs=1), progress=False
    )
    with no_sync():
        run = trainer.fit(loader(7), tiny_loader(2), epochs=2)
    assert sorted(run.metrics) == ["train/loss", "val/accuracy", "val/loss"]


def test_folding_many_values_of_a_metric_reads_no_tensor():
    with no_sync():
        Trainer(task(), progress=False).fit(tiny_loader(600, batch_size=1), epochs=1)


def test_weights_that_are_tensors_are_not_read():
    class Tokens(TinyTask):
        def train_step(self, batch, run):
            return {**super().train_step(batch, run), "weight": (batch[0] > 0).sum()}

        def eval_step(self, batch, run):
            return {**super().eval_step(batch, run), "weight": (batch[0] > 0).sum()}

    with no_sync():
        run = Trainer(Tokens(), accumulate=2, progress=False).fit(tiny_loader(), tiny_loader(), epochs=2)
    assert run.status == "completed"


def test_a_loop_by_hand_reads_no_tensor():
    mine = TinyTask()
    run = Run(model=mine.model, optimizers=[mine.optimizer])
    with no_sync(), loop.fit(run):
        for _ in loop.epochs(run, 2):
            for batch in loop.batches(run, tiny_loader(), accumulate=2):
                loss = mine.train_step(batch, run)["loss"]
                run.log({"loss": loss})
                loop.backward(run, loss)
                loop.optimizer_step(run, clip_norm=1.0)
            for batch in loop.evaluate(run, tiny_loader(2)):
                run.log({"loss": mine.eval_step(batch, run)["loss"]})
    assert run.status == "completed"


def test_a_prediction_reads_no_tensor():
    with no_sync():
        said = Trainer(task(), progress=False).predict(tiny_loader(3))
    assert torch.cat(said).shape == (6, 2)


def test_reading_a_metric_is_a_read():
    run = Trainer(task(), progress=False).fit(tiny_loader(), epochs=1)
    with pytest.raises(SyncFound, match=r"torch.Tensor.tolist reads a tensor's value, at .*metrics.py"), no_sync():
        run.metrics["train/loss"]


def test_a_callback_that_reads_in_a_step_is_found():
    class Reads(Callback):
        def on_batch_end(self, run):
            float(run.batch.loss)

    with pytest.raises(SyncFound, match=r"in on_batch_end: float"), no_sync():
        Trainer(task(), callbacks=[Reads()], progress=False).fit(tiny_loader(), epochs=1)


def test_a_callback_whose_errors_are_swallowed_is_found_all_the_same():
    class Reads(Callback):
        on_error = "disable"

        def on_batch_end(self, run):
            run.batch.loss.item()

    with pytest.raises(SyncFound, match=r"torch.Tensor.item reads"), no_sync():
        Trainer(task(), callbacks=[Reads()], progress=False).fit(tiny_loader(), epochs=1)
