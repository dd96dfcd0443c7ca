"""Small trainings in processes of their own, for tests that send them signals.

Reads one order per line: `{"run": name, "folder": path, ...}` forks and answers with the child's pid, `{"wait": pid,
"for_s": n}` answers with its exit code, negative for a signal's number, or null where it is still alive. The children
are forked from a process that has loaded everything and run nothing, which takes milliseconds, not seconds.
"""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch._dynamo  # what the first step of an optimizer brings in, which takes a second
from torch.utils.data import DataLoader, TensorDataset

from loopline import Callback, Every, Run, Trainer, loop
from loopline.callbacks import Preempt, preempt
from loopline.core.progress import Requests
from loopline.testing import TinyTask, tiny_loader

FOR_EVER = 10**9


def main():
    children = {}
    torch.set_num_threads(1)
    gc.freeze()  # a child that ends would look at all that is loaded here, and so copy it
    for line in sys.stdin:
        order = json.loads(line)
        if "run" in order:
            pid = os.fork()
            if pid == 0:
                return play(order)
            answer(pid)
        else:
            answer(wait(children, order["wait"], order["for_s"]))
    return None


def answer(value):
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def wait(children, pid, for_s):
    until = time.monotonic() + for_s
    while pid not in children and time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            children[pid] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.005)
    return children.get(pid)


def play(order):
    """What the process of one child does; how it ends is how the interpreter ends it."""
    os.setpgid(0, 0)
    folder = Path(order.pop("folder"))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    err = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT)
    os.dup2(err, 1)
    os.dup2(err, 2)
    PLAYS[order.pop("run")](Notes(folder), **order)


class Notes:
    """Lines in a file, each written at once; and what a checkpoint would be."""

    def __init__(self, folder):
        self.folder = folder
        self.file = os.open(folder / "notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *words):
        os.write(self.file, (" ".join(map(str, words)) + "\n").encode())

    def save(self, run, reason):
        state = {"steps": run.progress.steps, "epochs": run.progress.epochs, "reason": reason}
        new = self.folder / "saved.new"
        new.write_text(json.dumps(state))
        new.rename(self.folder / "saved.json")
        self.write("saved", run.progress.steps)


class Noting(Callback):
    """Writes down each step, and what the run looked like at the moment in which a signal came."""

    order = -(10**7)  # its handlers are there before Preempt's, which are to call them

    def __init__(self, notes, save=None):
        self.notes, self.save = notes, save or notes.save

    def on_setup(self, run):
        self.run, self.pid = run, os.getpid()
        run.saver = self.save
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self.came)

    def came(self, number, frame):
        if os.getpid() == self.pid:  # not a worker
            self.notes.write("signal", int(number), self.run.progress.steps, int(self.run.mid_step))

    def on_step_start(self, run):
        self.notes.write("step", run.step)

    def on_eval_start(self, run):
        self.notes.write("eval_start")

    def on_eval_end(self, run):
        self.notes.write("eval_end")

    def on_exception(self, run):
        self.notes.write("exception", type(run.error).__name__)

    def on_teardown(self, run):
        self.notes.write("teardown", run.status)


class At(Callback):
    """Does something at the n-th step's end, or at TEARDOWN."""

    def __init__(self, moment, act, n=3):
        self.act, self.n = act, n
        setattr(self, f"on_{moment}", self.come)

    def come(self, run):
        if run.step + 1 >= self.n:
            self.act()


class Slowly:
    """A loader that takes its time over each batch, in Python or outside of it."""

    def __init__(self, loader, wait):
        self.loader, self.wait = loader, wait

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            self.wait()
            yield batch


def spin(rounds=FOR_EVER):
    """Computes outside of Python, lets other threads go on, and hears no signal until it is done."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)


def plain(notes):
    """An epoch of seven steps, an evaluation, and so on; each batch takes two milliseconds."""
    train = Slowly(tiny_loader(7), lambda: time.sleep(0.002))
    validation = Slowly(tiny_loader(4, seed=1), lambda: time.sleep(0.001))
    callbacks = [Noting(notes), Preempt()]
    trainer = Trainer(TinyTask(), callbacks=callbacks, evaluate=Every(epochs=1) | Every(steps=5), progress=False)
    trainer.fit(train, validation, epochs=FOR_EVER)


def checkpointed(notes, into):
    """Three epochs with real checkpoints, measured every second step and at each epoch's end."""

    class Measured(Callback):
        def on_fit_start(self, run):
            notes.write("begun")

        def on_eval_end(self, run):
            if run.stage == "val":
                notes.write("measured", run.progress.steps, run.metrics["val/loss"].hex())

    task = TinyTask(momentum=0.9)
    trainer = Trainer(
        task,
        checkpoint=into,
        evaluate=Every(epochs=1) | Every(steps=2),
        callbacks=[Noting(notes), Measured()],
        progress=False,
        seed=1,
    )
    train = Slowly(tiny_loader(7), lambda: time.sleep(0.01))
    trainer.fit(train, Slowly(tiny_loader(4, seed=1), lambda: time.sleep(0.005)), epochs=3)
    notes.write("weights", *(number.hex() for p in task.model.parameters() for number in p.flatten().tolist()))


def swallowed(notes):
    """As plain, in a script that takes the run for finished."""
    try:
        plain(notes)
    except SystemExit:
        notes.write("swallowed")


class LosesTheRequest(Preempt):
    """What a handler does that writes where nobody looks any more."""

    def on_setup(self, run):
        super().on_setup(run)
        for number in self.signals:
            handler = signal.getsignal(number)
            signal.signal(number, lambda number, frame, handler=handler: self.lose(run, handler, number, frame))

    def lose(self, run, handler, number, frame):
        kept, run.requests = run.requests, Requests()
        handler(number, frame)
        run.requests = kept


def losing(notes):
    trained(notes, grace_s=1.0, kind=LosesTheRequest)


def trained(notes, *callbacks, loader=None, save=None, steps=FOR_EVER, kind=Preempt, **given):
    """The hand-written loop, with an epoch that takes long."""
    task = TinyTask()
    given = [kind(stacks=notes.folder / "stacks", **given), Noting(notes, save), *callbacks]
    run = Run(model=task.model, optimizers=[task.optimizer], callbacks=given)
    with loop.fit(run):
        for _ in loop.epochs(run, FOR_EVER, steps=steps):
            for batch in loop.batches(run, loader or Slowly(tiny_loader(1000), lambda: time.sleep(0.002))):
                loop.backward(run, task.train_step(batch, run)["loss"])
                loop.optimizer_step(run)


def asleep(notes, moment, **given):
    """Sleeps for ever in Python."""
    trained(notes, At(moment, lambda: (notes.write("stuck"), time.sleep(FOR_EVER))), steps=5, **given)


def spinning(notes, moment, **given):
    """Computes for ever outside of Python."""
    trained(notes, At(moment, lambda: (notes.write("stuck"), spin())), steps=5, **given)


def without_a_clock(notes):
    """As where only a handler in Python is asked to end what hangs outside of Python."""
    preempt._Clock._leave = lambda *given: None
    spinning(notes, "step_end", grace_s=0.2)


def stuck_save(notes, **given):
    def save(run, reason):
        notes.write("stuck")
        spin()

    trained(notes, save=save, **given)


def slow_fetch(notes):
    """Each batch takes half a second outside of Python."""
    trained(notes, loader=Slowly(tiny_loader(1000), lambda: (notes.write("fetching"), spin(500_000))))


def slow_save(notes):
    """Saves every step, which takes half a second outside of Python."""

    class SaveAlways(Callback):
        def on_step_end(self, run):
            run.save()

    def save(run, reason):
        notes.write("saving", run.progress.steps)
        spin(500_000)
        notes.save(run, reason)

    trained(notes, SaveAlways(), save=save)


def slow_teardown(notes):
    """Takes a while to leave when it is done."""
    trained(notes, At("teardown", lambda: (notes.write("closing"), time.sleep(0.5), notes.write("closed"))), steps=3)


def full_pipe(notes, **given):
    """Stuck, with a stderr that nobody reads."""
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.set_blocking(2, False)
    while True:
        try:
            os.write(2, b"x" * 512)
        except BlockingIOError:
            break
    os.set_blocking(2, True)
    asleep(notes, "step_end", **given)
    os.close(reader)


def interactive(notes):
    """As at a prompt: what happens to SIGINT leaves the session alive."""
    sys.ps1 = ">>> "
    try:
        trained(notes)
    except SystemExit as left:
        notes.write("prompt", left.code)
    try:
        asleep(notes, "step_end", grace_s=0.2)
    except KeyboardInterrupt:
        notes.write("prompt", "again")


def with_workers(notes, protected=True):
    """Two processes that load data, forked from the one that trains."""
    if not protected:
        preempt._loads_data = lambda: False
    data = TensorDataset(torch.randn(4000, 4), torch.zeros(4000, dtype=torch.long))
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
    trained(notes, loader=Slowly(loader, lambda: time.sleep(0.002)))


class HangsAt(TensorDataset):
    """Some item of it takes for ever."""

    def __getitem__(self, index):
        if index == 40:
            time.sleep(FOR_EVER)
        return super().__getitem__(index)


def with_a_worker_that_hangs(notes, deaf=False):
    if deaf:
        preempt._wait_for_parent = lambda: None
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.3  # how long torch waits for its workers, else 5 s
    data = HangsAt(torch.randn(4000, 4), torch.zeros(4000, dtype=torch.long))
    loader = DataLoader(data, batch_size=2, num_workers=2, prefetch_factor=8, multiprocessing_context="fork")
    trained(notes, loader=Slowly(loader, lambda: time.sleep(0.05)))


def with_a_child(notes):
    """A process of the user's own, forked while the run is on, must end when it is told to."""
    run = Run(callbacks=[Preempt()])
    with loop.fit(run):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[FOR_EVER], daemon=True)
        child.start()
        time.sleep(0.2)
        child.terminate()
        child.join(10)
        notes.write("child", child.exitcode)


def in_a_thread(notes):
    """Where no signal comes: run.stop is the way, and handlers are left as they are."""
    before = signal.getsignal(signal.SIGTERM)
    runs = []

    class Keep(Callback):
        def on_step_end(self, run):
            runs.append(run)

    class Unheard(Noting):
        def on_setup(self, run):
            run.saver = self.save

    def train():
        run = Run(callbacks=[Preempt(), Unheard(notes), Keep()])
        with loop.fit(run):
            for _ in loop.epochs(run, FOR_EVER):
                for _ in loop.batches(run, Slowly(range(1000), lambda: time.sleep(0.001))):
                    pass
        notes.write("over", run.status, run.reason)

    thread = threading.Thread(target=train)
    thread.start()
    while not runs:
        time.sleep(0.001)
    notes.write("untouched", signal.getsignal(signal.SIGTERM) == before)
    runs[-1].stop("enough")
    thread.join(20)


PLAYS = {
    made.__name__: made
    for made in (
        plain,
        checkpointed,
        swallowed,
        losing,
        asleep,
        spinning,
        without_a_clock,
        stuck_save,
        slow_fetch,
        slow_save,
        slow_teardown,
        full_pipe,
        interactive,
        with_workers,
        with_a_worker_that_hangs,
        with_a_child,
        in_a_thread,
    )
}

if __name__ == "__main__":
    main()
