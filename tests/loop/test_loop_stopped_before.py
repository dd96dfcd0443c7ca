"""An evaluation by itself that was stopped before it began."""

from __future__ import annotations

from loopline import Callback, StopRun, Trainer
from loopline.testing import Recorder, TinyTask, tiny_loader


def test_a_validation_stopped_at_setup_evaluates_nothing():
    class Stop(Callback):
        def on_setup(self, run):
            raise StopRun("not today")

    recorder = Recorder()
    trainer = Trainer(TinyTask(), callbacks=[recorder, Stop()], progress=False)
    measured = trainer.validate(tiny_loader())
    assert (measured, trainer.run.status, recorder.names) == ({}, "stopped", ["setup", "teardown"])
