import pytest

from loopline import Trainer
from loopline.callbacks import Subset
from loopline.testing import TinyTask, tiny_loader, tiny_stream


def batches_of(trainer, *, epochs=2, train=None):
    val = tiny_loader(batches=7)
    run = trainer.fit(train or tiny_loader(batches=9), val, epochs=epochs)
    return run.progress.batches, run.lengths["train"], run.lengths["val"]


def test_each_stage_takes_so_many_batches_per_pass():
    assert batches_of(Trainer(TinyTask(), callbacks=[Subset(train=3, val=2)], progress=False)) == (6, 3, 2)


def test_a_stage_that_is_left_out_is_whole():
    assert batches_of(Trainer(TinyTask(), callbacks=[Subset(val=2)], progress=False)) == (18, 9, 2)


def test_a_pass_that_is_shorter_stays_so():
    assert batches_of(Trainer(TinyTask(), callbacks=[Subset(train=100)], progress=False)) == (18, 9, 7)


def test_a_loader_without_a_length_is_limited_too():
    trainer = Trainer(TinyTask(), callbacks=[Subset(train=3)], progress=False)
    assert batches_of(trainer, train=tiny_stream(batches=9))[0] == 6


def test_of_two_limits_the_smaller_one_holds():
    trainers = [
        Trainer(TinyTask(), callbacks=[Subset(train=a), Subset(train=b)], progress=False) for a, b in [(2, 4), (4, 2)]
    ]
    assert [batches_of(trainer)[0] for trainer in trainers] == [4, 4]


def test_tests_and_predictions_are_limited():
    trainer = Trainer(TinyTask(), callbacks=[Subset(test=2, predict=3)], progress=False)
    trainer.test(tiny_loader())
    assert (trainer.run.lengths["test"], len(trainer.predict(tiny_loader()))) == (2, 3)


def test_nothing_to_limit_is_refused():
    with pytest.raises(ValueError, match="limits nothing"):
        Subset()


@pytest.mark.parametrize("share", [0.1, 1.0, True, "3"])
def test_what_is_not_a_whole_number_is_refused_with_the_reason(share):
    with pytest.raises(TypeError, match="A share of the data cannot be taken"):
        Subset(train=share)


@pytest.mark.parametrize("count", [0, -1])
def test_a_pass_of_no_batches_is_refused(count):
    with pytest.raises(ValueError, match=f"val={count}"):
        Subset(val=count)
