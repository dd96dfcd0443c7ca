"""The training loop, as functions that the Trainer and a hand-written loop call alike.

    with loop.fit(run):
        for _ in loop.epochs(run, 10):
            for x, y in loop.batches(run, train_loader):
                loss = criterion(model(x), y)
                loop.backward(run, loss)
                loop.optimizer_step(run)
            for x, y in loop.evaluate(run, val_loader):
                run.log({"loss": criterion(model(x), y)}, weight=len(x))

Every event of a run is sent from this file, in the order of `core/event.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from signal import Signals
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from .core import event as at
from .core.binding import name_of
from .core.errors import BadLoader, BadStep, Exit, LooplineError, Meddling, Preempted, RankMismatch, StopRun
from .core.event import (
    AFTER_BACKWARD,
    AFTER_OPTIMIZER_STEP,
    BATCH_END,
    BATCH_START,
    BEFORE_BACKWARD,
    BEFORE_OPTIMIZER_STEP,
    BEFORE_ZERO_GRAD,
    FETCH_END,
    FETCH_START,
    LOSS_READY,
    PASS_END,
    STEP_END,
    STEP_START,
    Event,
)
from .core.plan import Plan
from .core.progress import Batch, Progress
from .core.run import Run, Stage
from .core.when import Unit
from .data import size_of, start, trusted_length
from .metrics import Metrics, Watched
from .randomness import put_back, untouched

__all__ = [
    "backward",
    "batches",
    "check_limits",
    "clip_gradients",
    "epochs",
    "evaluate",
    "fit",
    "opened",
    "optimizer_step",
    "parameters",
    "safe_point",
]

logger = logging.getLogger("loopline")

_END = object()
_NOTHING = object()
_SEQUENCES = (tuple, list)


@contextmanager
def fit(run: Run) -> Iterator[Run]:
    """Around a training: SETUP and FIT_START before it, FIT_END after it, TEARDOWN whatever happens."""
    with opened(run):
        if run.ending:
            yield run  # stopped at SETUP: who was not reached hears nothing
            return
        try:
            run.emit(at.FIT_START)
            if run.progress != Progress():
                run.emit(at.RESUMED)
        except StopRun as stop:
            _stop(run, stop.reason)
        try:
            yield run
        except StopRun as stop:
            if isinstance(stop, _GivenUp) and run.training:
                safe_point(run)  # nothing but the evaluation was under way
            _stop(run, stop.reason)
        _train_end(run)
        _completed(run)
        run.emit(at.FIT_END)


@contextmanager
def opened(run: Run) -> Iterator[Run]:
    """Around any use of a run: SETUP before it, EXCEPTION if it fails, TEARDOWN for everybody who saw SETUP."""
    if run.status != "new":
        raise LooplineError(
            f"This run is {run.status}; a run is used once. Go on with a new one: Run(progress=run.progress, ...)."
        )
    _prepare(run)
    failure: BaseException | None = None
    try:
        try:
            run._set_up()
        except StopRun as stop:
            _stop(run, stop.reason)  # the body is entered all the same; its loops end at once
        yield run
    except StopRun as stop:
        _stop(run, stop.reason)
    except BaseException as error:
        failure = run.error = error
        run.status = "failed" if isinstance(error, Exception) else "interrupted"
        run.reason = f"{type(error).__name__}: {error}".rstrip(": ")
        _each_alone(run, at.EXCEPTION, failure)
        if isinstance(error, Exit):
            # Python says nothing of an error that ends the process
            logger.exception("The process ends with the exit code %s.", error.code)
        raise
    finally:
        run._open = False  # first: from here on a second SIGINT must not cut off what is left to do
        _completed(run)
        run._batch = None
        closing = _each_alone(run, at.TEARDOWN, failure)
        run.close()
        if failure is None and run.interrupted is not None:
            raise _preempted(run, closing)
        if len(closing) == 1 and isinstance(closing[0], KeyboardInterrupt | SystemExit):
            raise closing[0]  # as it is, for the sake of the exit code
        if closing and failure is None:
            raise BaseExceptionGroup("errors at teardown", closing)


def epochs(run: Run, epochs: int | None = None, *, steps: int | None = None) -> Iterator[int]:
    """The epochs that are still to do, up to so many epochs or so many optimizer steps, whichever comes first.

    A run that stops, or reaches its last step, inside an epoch leaves it unfinished: no PASS_END, no EPOCH_END.
    """
    check_limits(epochs, steps)
    run.limits.epochs, run.limits.steps = epochs, steps
    stopped_before = run.ending
    if stopped_before:
        return
    run.stage = "train"
    run._training = True
    run.emit(at.TRAIN_START)
    if run.progress != Progress() and run.comm.any(run.requests.evaluate)[0]:
        safe_point(run)  # an evaluation that the earlier run gave up
    while not _finished(run):
        run.epoch = run.progress.epochs
        if isinstance(run.model, nn.Module):
            run.model.train()
        if run.progress.batches_in_epoch == 0:
            run.step = run.progress.steps
            _put_back_streams(run)
            if isinstance(run.metrics, Metrics):
                run.metrics.begin()
            run.emit(at.EPOCH_START)
        yield run.epoch
        if run.ending:
            break
        if run.mid_step:
            raise LooplineError(_broken(run))
        run._may_give_up = False
        run.emit(at.EPOCH_END)
        _step_schedulers(run, "epochs", run.epoch + 1, watching=False)
        _step_schedulers(run, "epochs", run.epoch + 1, watching=True)
        run.progress.epochs += 1
        run.progress.batches_in_epoch = 0
        safe_point(run)
    _completed(run)
    _train_end(run)


def batches(
    run: Run,
    loader: Iterable[Any],
    *,
    accumulate: int | None = None,
    unfinished: Literal["step", "drop"] = "step",
    zero_grad: bool = True,
) -> Iterator[Any]:
    """The training batches of an epoch that are still to do, in windows of `accumulate` batches.

    A window ends early at the epoch's last batch; with `unfinished="drop"` such a window takes no step. Gradients are
    cleared at the first batch of a window, before the forward pass.
    """
    if accumulate is not None:
        run.accumulate = accumulate
    if run.accumulate < 1:
        raise ValueError(f"accumulate={run.accumulate}: a window has at least one batch.")
    progress, emit = run.progress, run.emit
    index = progress.batches_in_epoch
    length = _length(run, loader, "train")
    iterator = _from(run, loader, index)
    run._in_pass = True
    data: Any
    # names of the module cost more in here
    end, nothing, sequences, tensor, plain_clearing = _END, _NOTHING, _SEQUENCES, Tensor, Optimizer.zero_grad
    ahead: Any = nothing
    place = 0  # in the window, counted from 1
    more = not _out_of_steps(run)
    plan: Plan | None = None
    batch = Batch(None, 0)
    while more:
        # In here each call counts: an event that nobody hears costs one look at a local name.
        if run._plan is not plan:
            plan = run._plan
            at_fetch, at_fetched, at_step, at_batch, at_zero, at_batch_end, at_step_end = plan.of_pass
        if ahead is nothing:
            if at_fetch:
                emit(FETCH_START)
            data = next(iterator, end)
            if at_fetched:
                emit(FETCH_END)
        else:
            data, ahead = ahead, nothing
        if data is end:
            break
        place += 1
        last = place >= run.accumulate
        if not last and unfinished == "step":
            if length is not None:
                last = index + 1 == length
            else:  # only here must the next batch be seen before this one is used
                ahead = _look_ahead(run, iterator)
                last = ahead is end
                if last:
                    ahead = nothing  # its end is asked for again, as it is after a resume
        first = data[0] if type(data) in sequences and data else data  # the inputs, as a rule
        shape = first.shape if type(first) is tensor else None
        batch.data, batch.index, batch.size = data, index, shape[0] if shape else size_of(data)
        batch.first_of_window, batch.last_of_window = place == 1, last
        run._batch = batch
        del data, first
        try:
            if place == 1:
                run.step = progress.steps
                run.skipped = None
                run._weight = None
                run.mid_step = True
                if at_step:
                    emit(STEP_START)
            if run._plan is not plan:  # somebody was attached a moment ago
                plan = run._plan
                at_fetch, at_fetched, at_step, at_batch, at_zero, at_batch_end, at_step_end = plan.of_pass
            if at_batch:
                emit(BATCH_START)
            if place == 1 and zero_grad:
                if at_zero or run._plan is not plan:
                    emit(BEFORE_ZERO_GRAD)
                for optimizer in run.optimizers:
                    if getattr(optimizer.zero_grad, "__func__", None) is not plain_clearing:
                        optimizer.zero_grad()
                        continue
                    for group in optimizer.param_groups:
                        for parameter in group["params"]:
                            parameter.grad = None  # what zero_grad does, without the profiler's record around it
            yield batch.data
            if last and run._schedule and run.skipped is None:
                _step_schedulers(run, "steps", run.step + 1, watching=False)
            if at_batch_end or run._plan is not plan:
                emit(BATCH_END)
            progress.batches += 1
            progress.batches_in_epoch += 1
            progress.samples += batch.size
        finally:
            run._batch = batch.data = batch.output = batch.loss = None  # free it before the next one is fetched
        index += 1
        if last:
            place = 0
            if at_step_end or run._plan is not plan:
                emit(STEP_END)
            progress.steps += 1
            run.mid_step = False
            requests = run.requests
            if requests.stop is not None or requests.save is not None or requests.evaluate or run._always_ask:
                safe_point(run)
            if run.ending:
                return
            more = progress.steps != run.limits.steps
    if _out_of_steps(run) and index != length:
        run.ending = run._may_give_up = True
        return
    if index == 0:
        raise BadLoader(_nothing(run, "train"))
    if place and unfinished == "step":
        raise BadLoader(
            f"The training loader's length is {length}, but it gave {index} batches in epoch {run.epoch}, so the last "
            f"window of {run.accumulate} was never finished. Correct its __len__, or remove it."
        )
    run._gave.add("train")
    run._in_pass = False
    run.mid_step = False  # an unfinished window was dropped
    emit(PASS_END)
    run._may_give_up = True


def backward(run: Run, loss: Tensor, *, weight: Any = None) -> None:
    """Add the gradients of this batch's loss to its window.

    In a window of several batches each loss counts by its `weight`, the batch's size where none is given, and the
    window's gradients are the weighted mean over everything in it.
    """
    batch = run._batch or run.batch
    batch.loss = loss
    heard = run._plan.of_backward
    if heard:
        run.emit(LOSS_READY)
        loss = batch.loss
    if run.accumulate > 1:
        loss = _weighed(run, loss, batch.size if weight is None else weight)
    if heard:
        run.emit(BEFORE_BACKWARD)
    try:
        if run.scaler is not None:
            loss = run.scaler.scale(loss)
        if batch.last_of_window or run.strategy is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            with run.strategy.unfinished_window(run.parts):
                loss.backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, AttributeError) as error:
        if wrong := _wrong_with(batch.loss):
            raise BadStep(wrong) from error
        raise
    if heard or run._plan.of_backward:
        run.emit(AFTER_BACKWARD)


def optimizer_step(run: Run, *, clip_norm: float | None = None) -> bool:
    """Change the weights if this batch ends its window; say whether they changed.

    They stay as they are if a handler asked for it with `run.skip_step`, or if half-precision gradients overflowed.
    """
    batch = run._batch or run.batch
    if not batch.last_of_window:
        return False
    if run.accumulate > 1:
        _divide_gradients(run)
    scaler = run.scaler
    if scaler is not None:
        for optimizer in run.optimizers:
            scaler.unscale_(optimizer)
    heard = run._plan.of_step
    if heard:
        run.emit(BEFORE_OPTIMIZER_STEP)
    if clip_norm is not None:
        clip_gradients(run, clip_norm)
    if scaler is not None:
        _scaled_step(run, scaler)
    elif run.skipped is None:
        for optimizer in run.optimizers:
            optimizer.step()
    if run.skipped is not None:
        return False
    if heard:
        run.emit(AFTER_OPTIMIZER_STEP)
    return True


def clip_gradients(run: Run, max_norm: float) -> Tensor:
    """Scale the gradients down to a total norm, in the strategy's way; give the norm that they had."""
    if run.strategy is not None:
        norm: Tensor = run.strategy.clip(run.parts, max_norm)
        return norm
    unclipped: Tensor = clip_grad_norm_(parameters(run), max_norm)
    return unclipped


def evaluate(run: Run, loader: Iterable[Any], *, stage: Stage = "val") -> Iterator[Any]:
    """The batches of one evaluation: no gradients, evaluation mode, and metrics under the stage's name.

    May be called inside a handler: batch, stage, modes and random streams are given back as they were, so that
    looking at a model never changes how it trains. A signal ends it after the batch in hand, and leaves no metrics of
    it: a run that goes on evaluates from the beginning.
    """
    if _is_stopped(run) and not run._told:
        return  # a run that was stopped inside an epoch leaves it unfinished
    _give_up_if_interrupted(run)
    with ExitStack() as back:
        back.enter_context(untouched())
        back.enter_context(torch.no_grad())
        back.callback(_give_back, run, run.stage, run._batch, _modes(run.model))
        if isinstance(run.model, nn.Module):
            run.model.eval()
        run.stage, run._batch = stage, None
        metrics = run.metrics if isinstance(run.metrics, Metrics) else Metrics()
        metrics.begin(stage)
        _length(run, loader, stage)
        if stage == "sanity":
            run.emit(at.SANITY_START)
        run.emit(at.EVAL_START)
        run.emit(at.EVAL_EPOCH_START)
        index = -1
        for index, data in enumerate(islice(loader, run.limits.batches.get(stage))):
            run._batch = Batch(data, index, size=size_of(data))
            run.emit(at.EVAL_BATCH_START)
            yield data
            run.emit(at.EVAL_BATCH_END)
            run._batch = None
            if run.interrupted is not None:
                _give_up_if_interrupted(run, metrics)
        if index < 0:
            raise BadLoader(_nothing(run, stage))
        run._gave.add(stage)
        run.emit(at.EVAL_EPOCH_END)
        metrics.finish(stage)
        run.emit(at.EVAL_END)
        if stage == "sanity":
            metrics.forget("sanity")
            run.emit(at.SANITY_END)


def safe_point(run: Run) -> None:
    """The only place where requests are answered: counts are final and no batch is in hand."""
    run._answering = True
    stop, save, evaluate = _agree(run)
    measured = True
    if evaluate and run.evaluator is not None:
        measured = _evaluated(run)
        stop_too, save_too, _ = _agree(run)  # what the evaluation's handlers ask for is answered here as well
        stop, save = _first(stop, stop_too), _first(save, save_too)
        run.requests.evaluate |= not measured  # the run that goes on from here does it first
    if measured:
        _step_schedulers(run, "steps", run.progress.steps, watching=True)
    save = _first(save, stop)  # a run that stops is saved first
    if save is not None and run.saver is not None:
        run.saver(run, save)
        stop = _first(stop, _agreed_stop(run, run.requests.stop))  # meanwhile; it need not be saved twice
    if stop is not None:
        _stop(run, stop)
    run._answering = False


def _agree(run: Run) -> tuple[str | None, str | None, bool]:
    """What is asked for on any rank, with the reasons; it counts as answered from here on.

    Struck out is only what was seen: a signal's handler, or another thread, may ask for something at any moment.
    """
    asked = run.requests
    stop, save, evaluate = asked.stop, asked.save, asked.evaluate
    if stop is not None:
        asked.stop = None
    if save is not None:
        asked.save = None
    if evaluate:
        asked.evaluate = False
    if run.comm.world_size == 1:
        return stop, save, evaluate
    stops, saves, evaluate = run.comm.any(stop is not None, save is not None, evaluate)
    return _reason_to_stop(run, stop) if stops else None, _reason(run, save) if saves else None, evaluate


def _agreed_stop(run: Run, mine: str | None) -> str | None:
    if run.comm.world_size == 1:
        return mine
    return _reason_to_stop(run, mine) if run.comm.any(mine is not None)[0] else None


def _reason_to_stop(run: Run, mine: str | None) -> str:
    """A signal if one came to any rank, so that all of them leave with its code; else the lowest rank's reason."""
    numbers = [number for number in run.comm.gather(run.interrupted) if isinstance(number, int)]
    reason = _reason(run, mine)
    if numbers:
        run.interrupted = max(numbers)
        return Signals(run.interrupted).name
    return reason


def _reason(run: Run, mine: str | None) -> str:
    """The reason of the lowest rank that has one."""
    return next(str(reason) for reason in run.comm.gather(mine) if reason is not None)


def _first(one: str | None, other: str | None) -> str | None:
    return other if one is None else one


class _GivenUp(StopRun):
    """Leaves an evaluation, and all that would read its metrics, because of a signal."""


def _give_up_if_interrupted(run: Run, metrics: Metrics | None = None) -> None:
    """Leave an evaluation that may take longer than the process has to live.

    Not inside a handler, nor in the middle of a step, where the run could not be gone on with; and not on several
    ranks, which would wait for each other: there the evaluation goes through.
    """
    if run.interrupted is None or run.comm.world_size > 1 or not (run._may_give_up or not run.training):
        return
    if metrics is not None:
        metrics.forget(run.stage)
    signal = Signals(run.interrupted).name
    run.stop(signal)
    raise _GivenUp(signal)


def _evaluated(run: Run) -> bool:
    """Evaluate at a safe point; say whether it went through."""
    run._may_give_up = True
    try:
        run.evaluator(run)
    except _GivenUp:
        return False
    finally:
        run._may_give_up = False
    return True


def _prepare(run: Run) -> None:
    if run.comm.world_size > 1:
        _compare_ranks(run)
    if not isinstance(run.metrics, Metrics):
        run.metrics = Metrics(run.metrics)
    run._apart = _apart
    run._schedule = [(s, s.when.watch(), Watched(s.metric) if s.metric else None) for s in run.schedulers]
    run._always_ask = run.comm.world_size > 1 or any(s.metric for s in run.schedulers)
    run._unreached = {id(binding.owner) for binding in run.plan.bindings.get(at.SETUP, ())}
    run.status = "running"
    run._open = True


def _compare_ranks(run: Run) -> None:
    """An exchange that only some ranks take part in would never end: better to refuse now."""
    mine = run.plan.everywhere
    for rank, theirs in enumerate(run.comm.gather(mine)):
        if theirs != mine:
            odd = sorted(set(cast(tuple[str, ...], theirs)) ^ set(mine)) or ["the order of attachment"]
            raise RankMismatch(
                f"Rank {rank} and rank {run.comm.rank} do not hold the same listeners; they differ in: "
                f"{'; '.join(odd)}. Attach the same callbacks on every rank, and let their `ranks` say where they act."
            )


def _each_alone(run: Run, event: Event, failure: BaseException | None) -> list[BaseException]:
    """Call every handler of an event, whatever the others do: a first failure is never hidden by a later one.

    TEARDOWN goes backwards, who was set up first being torn down last, and leaves out whom SETUP did not reach.
    """
    errors: list[BaseException] = []
    plan = run.plan
    handlers = list(zip(plan.bindings.get(event, ()), plan[event], strict=True))
    if event is at.TEARDOWN:
        handlers = [pair for pair in reversed(handlers) if id(pair[0].owner) not in run._unreached]
    for binding, handler in handlers:
        try:
            handler(run)
        except BaseException as error:  # collected, and raised together at the end
            where = f"{name_of(binding.owner)} failed at {event.name}"
            errs = binding.on_error == "raise" or run._strict or isinstance(error, Meddling)
            errs = errs or not isinstance(error, Exception)  # Ctrl-C comes out of an observer, too
            if failure is None and errs:
                error.add_note(where)
                errors.append(error)
                continue
            logger.warning("%s: %s: %s", where, type(error).__name__, error, exc_info=error)
            if failure is not None:
                failure.add_note(f"then {where}: {type(error).__name__}: {error}")
    return errors


def _train_end(run: Run) -> None:
    """STOPPED if that is so, and TRAIN_END if there was a TRAIN_START; each once."""
    if _is_stopped(run) and not run._told:
        run._told = True
        run.emit(at.STOPPED)
    if run._training:
        run._training = False
        run.emit(at.TRAIN_END)


def _completed(run: Run) -> None:
    if run.status == "running":
        run.status = "completed"


def _preempted(run: Run, closing: list[BaseException]) -> Preempted:
    """What ends the process of a run to which a signal came. Python is silent about it, so it is logged."""
    number = cast(int, run.interrupted)
    for error in closing:
        logger.error("%s: %s", type(error).__name__, error, exc_info=error)
    said = "%s after %d steps: the run is %s, and leaves with the exit code %d."
    logger.warning(said, Signals(number).name, run.progress.steps, run.status, 128 + number)
    return Preempted(128 + number)


def _stop(run: Run, reason: str) -> None:
    run.status = "stopped" if run.interrupted is None else "interrupted"
    run.reason, run.ending = reason, True


def _is_stopped(run: Run) -> bool:
    return run.status in ("stopped", "interrupted")


def _from(run: Run, loader: Any, index: int) -> Iterator[Any]:
    """The batches of an epoch from one on, as many as there may be."""
    iterator = start(loader, run.epoch, index, run._loader_states.pop("train", None))
    _put_back_streams(run)  # after the loader has drawn what it drew once already
    limit = run.limits.batches.get("train")
    return iterator if limit is None else islice(iterator, max(0, limit - index))


def _put_back_streams(run: Run) -> None:
    """Give the random streams the state that a checkpoint kept of them, where training goes on from one."""
    if run._streams is not None:
        put_back(run._streams)
        run._streams = None


def _look_ahead(run: Run, iterator: Iterator[Any]) -> Any:
    run.emit(FETCH_START)
    data = next(iterator, _END)
    run.emit(FETCH_END)
    return data


def _weighed(run: Run, loss: Tensor, weight: Any) -> Tensor:
    if wrong := _wrong_with(loss):
        raise BadStep(wrong)
    run._weight = weight if run._weight is None else run._weight + weight
    weighed: Tensor = loss * weight
    return weighed


def _scaled_step(run: Run, scaler: Any) -> None:
    moving = [o for o in run.optimizers if any(p.grad is not None for g in o.param_groups for p in g["params"])]
    if not moving:
        return
    if len(moving) > 1 and not _all_finite(parameters(run)):
        run.skipped = run.skipped or "half-precision gradients overflowed"  # else some would step, and some not
    if run.skipped is None:
        for optimizer in moving:
            scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    after = scaler.get_scale()
    if after < before:
        run.skipped = run.skipped or f"half-precision gradients overflowed; the loss scale is now {after:g}"


def check_limits(epochs: int | None, steps: int | None) -> None:
    """Refuse what says nothing of how far to train."""
    if epochs is None and steps is None:
        raise ValueError("Say how far to train: epochs=..., steps=..., or both.")
    for name, count in (("epochs", epochs), ("steps", steps)):
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
            raise ValueError(f"{name}={count!r}: give a whole number, 0 or more; 0 trains nothing.")


def _out_of_steps(run: Run) -> bool:
    return run.limits.steps is not None and run.progress.steps >= run.limits.steps


def _finished(run: Run) -> bool:
    """Whether nothing is left to do; an epoch already begun may still want its end."""
    if run.ending:
        return True
    if run.limits.epochs is not None and run.progress.epochs >= run.limits.epochs:
        return True
    return _out_of_steps(run) and run.progress.batches_in_epoch == 0


def _length(run: Run, loader: Iterable[Any], stage: Stage) -> int | None:
    """How many batches a pass will have, if that is known; noted for progress bars."""
    length = trusted_length(loader)
    limit = run.limits.batches.get(stage)
    if limit is not None:
        length = limit if length is None and stage != "train" else None if length is None else min(length, limit)
    run.lengths[stage] = length
    run.loaders[stage] = loader
    return length


def _divide_gradients(run: Run) -> None:
    """From the sum over a window to its weighted mean."""
    gradients = [parameter.grad for parameter in parameters(run) if parameter.grad is not None]
    if isinstance(run._weight, Tensor):
        torch._foreach_div_(gradients, run._weight.detach().clamp(min=torch.finfo(torch.float32).tiny))
    elif run._weight is None:
        raise LooplineError(
            f"This window of {run.accumulate} batches has no gradients from loop.backward, so their weights are not "
            "known. Call loop.backward(run, loss) in place of loss.backward(), or step the optimizer yourself."
        )
    elif run._weight == 0:
        run.skipped = run.skipped or "the weights of this window add up to 0"
    elif gradients:
        torch._foreach_div_(gradients, float(run._weight))


def parameters(run: Run) -> list[Tensor]:
    """Everything that the optimizers hold, in their order."""
    return [p for optimizer in run.optimizers for group in optimizer.param_groups for p in group["params"]]


def _step_schedulers(run: Run, unit: Unit, count: int, *, watching: bool) -> None:
    for scheduled, due, watched in run._schedule:
        if (watched is not None) is not watching or not due(unit, count):
            continue
        if watched is None:
            scheduled.scheduler.step()
        elif (value := watched.new(run)) is not None:
            scheduled.scheduler.step(value)


def _modes(model: Any) -> Collection[tuple[nn.Module, bool]]:
    found: dict[int, tuple[nn.Module, bool]] = {}
    waiting = [model] if isinstance(model, nn.Module) else []
    while waiting:  # model.modules() takes three times as long
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module, module.training
            waiting += [child for child in module._modules.values() if child is not None]
    return found.values()


@contextmanager
def _apart(run: Run) -> Iterator[None]:
    """Around an observer that is not careful: streams, modes and what is in hand are afterwards what they were."""
    with untouched(), torch.set_grad_enabled(torch.is_grad_enabled()):
        before = run.stage, run._batch, _modes(run.model)
        try:
            yield
        finally:
            _give_back(run, *before)


def _give_back(run: Run, stage: Stage, batch: Batch | None, modes: Iterable[tuple[nn.Module, bool]]) -> None:
    run.stage, run._batch = stage, batch
    for module, training in modes:
        if module.training is not training:  # setting it takes a microsecond
            module.training = training


def _all_finite(parameters: list[Tensor]) -> bool:
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
    return bool(torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().all())


def _broken(run: Run) -> str:
    return (
        f"loop.batches was left in the middle of step {run.step}, so that epoch {run.epoch} is neither finished nor to "
        "be gone on with. To shorten a pass set run.limits.batches['train'] or attach Subset(train=...); to end the "
        "run call run.stop(reason)."
    )


def _wrong_with(loss: object) -> str | None:
    """What keeps a loss from being trained on, if anything does."""
    if not isinstance(loss, Tensor):
        return f"The loss is a {type(loss).__name__}, {loss!r}; it must be a tensor with one number."
    if loss.numel() != 1:
        return f"The loss has the shape {tuple(loss.shape)}; it must be one number. Take its mean() or sum()."
    if not loss.requires_grad:
        return (
            "The loss has no gradient: nothing that it was computed from requires one. Was it detached, computed "
            "under no_grad, or is every parameter of the model frozen?"
        )
    return None


def _nothing(run: Run, stage: Stage) -> str:
    what = "training" if stage == "train" else stage
    if stage not in run._gave:
        return f"The {what} loader gave no batch. Is the dataset empty, or smaller than a batch with drop_last=True?"
    return (
        f"The {what} loader gave no batch in epoch {run.epoch}. If it is a generator or an iterator, it can be read "
        "only once; give a DataLoader, a list, or an object whose __iter__ starts anew."
    )
