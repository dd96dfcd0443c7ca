"""The progress display: live on a terminal, plain lines elsewhere, and free of charge for the steps it shows.

No handler here is bound to a batch or a step. A thread looks at the run a few times a second and draws what it sees.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from ..core.callback import Callback
from ..core.errors import NoBatch
from ..randomness import untouched
from .print_metrics import number, readable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

    from ..core.run import Run

__all__ = ["ProgressBar"]

logger = logging.getLogger("loopline")

_RATE_OVER_S = 5.0
_METRICS_EVERY_S = 0.5

_Span = tuple[str, str]  # a text and its style


class ProgressBar(Callback):
    """Shows how far a run is: a live display on a terminal or in a notebook, plain lines elsewhere.

    Each finished epoch leaves one line. Below, on a terminal, the epoch in progress is redrawn every `refresh_s`
    seconds; elsewhere an epoch that takes long says where it is every `every_s` seconds. `console` is a rich console,
    by default the one that `rich.print` uses.
    """

    ranks = "zero"
    reads = frozenset(["metrics"])
    on_error = "disable"
    careful = True

    def __init__(self, refresh_s: float = 0.2, every_s: float = 30.0, *, console: Console | None = None) -> None:
        for name, seconds in (("refresh_s", refresh_s), ("every_s", every_s)):
            if not isinstance(seconds, int | float) or not seconds > 0:
                raise ValueError(f"ProgressBar({name}={seconds!r}): give a number of seconds above 0.")
        self.refresh_s = refresh_s
        self.every_s = every_s
        self.console = console
        self._watch: _Watch | None = None
        self._screen: _Live | _Plain | None = None

    def on_setup(self, run: Run) -> None:
        self._watch = _Watch(run)

    def on_train_start(self, run: Run) -> None:
        watch, _ = self._open(run)
        watch.training_began()

    def on_epoch_start(self, run: Run) -> None:
        watch, _ = self._open(run)
        watch.epoch_began()

    def on_eval_start(self, run: Run) -> None:
        watch, _ = self._open(run)
        watch.evaluation_began()

    def on_eval_end(self, run: Run) -> None:
        watch, screen = self._open(run)
        took_s = watch.evaluation_ended()
        if not watch.training and run.stage != "sanity":
            values = {n: v for n, v in readable(run).items() if n.startswith(f"{run.stage}/")}
            screen.say(_evaluated(run, values, took_s))

    def on_epoch_end(self, run: Run) -> None:
        watch, screen = self._open(run)
        screen.epoch_done(watch.row())

    def on_train_end(self, run: Run) -> None:
        watch, screen = self._open(run)
        if run.progress.batches_in_epoch:  # it ended inside an epoch, which no EPOCH_END tells of
            screen.epoch_done(watch.row(in_part=True))

    def on_teardown(self, run: Run) -> None:
        watch, screen = self._watch, self._screen
        self._watch = self._screen = None
        if screen is not None:
            screen.close()
            if watch is not None and watch.training:
                screen.last_words(*watch.last_words())

    def _open(self, run: Run) -> tuple[_Watch, _Live | _Plain]:
        """The display, begun when there is something to show, so that what is printed before stays untouched."""
        if self._watch is None:
            self._watch = _Watch(run)
        if self._screen is None:
            self._screen = self._new_screen(self._watch)
        return self._watch, self._screen

    def _new_screen(self, watch: _Watch) -> _Live | _Plain:
        with untouched():  # rich draws a random number as it is imported
            import rich
            from rich.errors import LiveError

            console = self.console if self.console is not None else rich.get_console()
        if (console.is_terminal and not console.is_dumb_terminal) or _draws_in_notebook(console):
            try:
                return _Live(console, watch, self.refresh_s)
            except LiveError as error:
                logger.warning("ProgressBar: this console has another live display (%s); plain lines instead.", error)
        return _Plain(console, watch, self.every_s)


class _Watch:
    """What is known of a run at this moment, read from outside without its taking notice."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.training = False
        self.rate: float | None = None
        self.metrics: dict[str, float] = {}
        self.evaluation: tuple[str, int | None] | None = None  # its stage, and the batch last seen in hand
        self.names: list[str] = []
        self._began = self._epoch_began = time.monotonic()
        self._evaluation_began: float | None = None
        self._evaluating_s = 0.0
        self._last_evaluation_s = 0.0
        self._evaluated = False
        self._read = 0.0
        self._samples: deque[tuple[float, int]] = deque()
        self._first: tuple[float, int] | None = None
        self._foreign = _device_of(run) not in ("cpu", "cuda")

    def training_began(self) -> None:
        self.training = True
        self._epoch_began = time.monotonic()

    def epoch_began(self) -> None:
        self._epoch_began = time.monotonic()
        self._evaluated = False

    def evaluation_began(self) -> None:
        self.evaluation = self.run.stage, None
        self._evaluation_began = time.monotonic()

    def evaluation_ended(self) -> float:
        took_s = time.monotonic() - (self._evaluation_began or time.monotonic())
        self._evaluating_s += took_s
        self._last_evaluation_s = took_s
        self._evaluation_began = self.evaluation = None
        self._evaluated |= self.run.stage == "val"
        self._read = 0.0
        return took_s

    def look(self) -> None:
        """Take a sample. On the display's own thread: a value of the device is waited for here, and the run goes on."""
        now = time.monotonic()
        batches = self.run.progress.batches
        self._look_at_evaluation()
        if self._evaluation_began is None and self.training:
            at = now - self._evaluating_s
            self._samples.append((at, batches))
            while at - self._samples[0][0] > _RATE_OVER_S and len(self._samples) > 2:
                self._samples.popleft()
            (then, before), passed = self._samples[0], batches - self._samples[0][1]
            if passed > 0 and at > then:
                self.rate = (batches - before) / (at - then)
            if self._first is None and batches:
                self._first = now, batches  # from here on, so that a slow first batch is not taken for the pace
        if now - self._read >= _METRICS_EVERY_S and not self._foreign:
            self._read = now
            # the run may change them in between; there is a next time
            with contextlib.suppress(RuntimeError, KeyError):
                self.metrics = readable(self.run, elsewhere=True)

    def _look_at_evaluation(self) -> None:
        run, known = self.run, self.evaluation
        if known is None or not run.in_batch:
            return
        try:
            index = run.batch.index
        except NoBatch:
            return
        if run.stage == known[0] and self.evaluation is known:
            self.evaluation = known[0], index

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def left_s(self) -> float | None:
        """A guess from the pace so far, evaluations included."""
        left, first = self._batches_left(), self._first
        if left is None or first is None or self.run.progress.batches <= first[1]:
            return None
        now = time.monotonic()
        left_s = left * (now - first[0]) / (self.run.progress.batches - first[1])
        if self._evaluation_began is not None:
            left_s += max(0.0, self._last_evaluation_s - (now - self._evaluation_began))
        return left_s

    def _batches_left(self) -> int | None:
        run, length = self.run, self.run.lengths.get("train")
        left = []
        if run.limits.epochs is not None and length is not None:
            left.append((run.limits.epochs - run.progress.epochs) * length - run.progress.batches_in_epoch)
        if run.limits.steps is not None:
            left.append((run.limits.steps - run.progress.steps) * run.accumulate)
        return max(0, min(left)) if left else None

    def row(self, *, in_part: bool = False) -> _Row:
        """The line that an epoch leaves; metrics of an evaluation that it did not have are left out."""
        self.metrics = readable(self.run)
        self._read = time.monotonic()
        values = {n: v for n, v in _shown(self.metrics).items() if self._evaluated or not n.startswith("val/")}
        self.names += [name for name in values if name not in self.names]
        self.names.sort(key=lambda name: name.startswith("val/"))
        took_s = time.monotonic() - self._epoch_began
        return _Row(_of(self.run.epoch + 1, self.run.limits.epochs), list(self.names), values, took_s, in_part)

    def last_words(self) -> tuple[str, str]:
        """How the run ended, and why if there is more to say."""
        run = self.run
        done = f"{_count(run.progress.epochs, 'epoch')}, {_count(run.progress.steps, 'step')}, {_time(self.elapsed_s)}"
        reason = (run.reason or "").strip().split("\n")[0]
        return f"{run.status} after {done}", "" if reason == "KeyboardInterrupt" else reason

    def interim(self) -> str:
        """Where a long epoch is, in one line."""
        run = self.run
        total = run.lengths.get("train")
        words = [_epoch_label(run), f"batch {_of(run.progress.batches_in_epoch, total)}"]
        words.append(f"step {run.progress.steps}")
        if self.evaluation is not None:
            stage, index = self.evaluation
            words.append(stage if index is None else f"{stage} batch {_of(index, run.lengths.get(stage))}")
        words += [f"{name} {number(value)}" for name, value in _shown(self.metrics).items()]
        if self.rate:
            words.append(_rate(self.rate))
        words.append(f"{_clock(self.elapsed_s)} elapsed")
        if (left_s := self.left_s) is not None:
            words.append(f"{_clock(left_s)} left")
        return "  ".join(words)


@dataclass(frozen=True, slots=True)
class _Row:
    """A finished epoch, ready to be written as a line or as a row of a table."""

    epoch: str
    names: Sequence[str]
    values: dict[str, float]
    took_s: float
    in_part: bool

    def cells(self) -> list[str]:
        said = [f"{name} {number(self.values[name])}" for name in self.names if name in self.values]
        return [f"epoch {self.epoch}{' in part' if self.in_part else ''}", *said, _time(self.took_s)]

    def columns(self) -> list[tuple[str, str]]:
        """Pairs of a heading and what stands under it, both of one width."""
        pairs = [("epoch", self.epoch)]
        pairs += [(name, number(self.values[name]) if name in self.values else "") for name in self.names]
        pairs.append(("time", _time(self.took_s)))
        widths = [max(len(heading), 8 if heading != "epoch" else len(self.epoch)) for heading, _ in pairs]
        return [(f"{h:>{width}}", f"{said:>{width}}") for (h, said), width in zip(pairs, widths, strict=True)]


class _Plain:
    """Lines for files, pipes and terminals that cannot be drawn on."""

    def __init__(self, console: Console, watch: _Watch, every_s: float) -> None:
        self._console = console
        self._watch = watch
        self._every_s = every_s
        self._said = time.monotonic()
        self._open = True
        self._lock = threading.Lock()
        self._ticker = _Ticker(self._tick)

    def say(self, line: str) -> None:
        with self._lock:
            self._said = time.monotonic()
            if not self._open:
                return
            try:
                self._console.file.write(f"{line}\n")
                self._console.file.flush()
            except (OSError, ValueError):
                self._open = False  # whoever read this has gone; the run has not

    def epoch_done(self, row: _Row) -> None:
        self.say("  ".join(row.cells()))

    def last_words(self, ending: str, reason: str) -> None:
        self.say(f"{ending}: {reason}" if reason else ending)

    def close(self) -> None:
        self._ticker.stop()

    def _tick(self) -> float:
        """One look; gives the seconds until the next. Nothing is said where an epoch's line was said just before."""
        self._watch.look()
        wait_s = self._said + self._every_s - time.monotonic()
        if wait_s <= 0:
            if self._watch.training or self._watch.evaluation is not None:
                self.say(self._watch.interim())
            wait_s = self._every_s
        return min(wait_s, max(1.0, self._every_s / 10))


class _Live:
    """The redrawn lines at the bottom of a terminal, and what is printed above them."""

    def __init__(self, console: Console, watch: _Watch, refresh_s: float) -> None:
        from rich.live import Live

        self._console = console
        self._watch = watch
        self._refresh_s = refresh_s
        self._heading: list[str] = []
        self._rows_since = 0
        frame = _Frame(watch, ascii_only=not console.encoding.startswith("utf"))
        self._live = Live(
            get_renderable=lambda: frame,
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()
        self._streams = None if console.is_jupyter else _Streams(console)
        self._ticker = _Ticker(self._tick)

    def say(self, line: str) -> None:
        self._print([(line, "")])

    def last_words(self, ending: str, reason: str) -> None:
        style = _STYLE_OF_STATUS.get(ending.split(" ")[0], "")
        between = ": " if len(ending) + len(reason) + 2 <= self._console.width else "\n  "
        self._print([("\n", ""), (ending, style), (f"{between}{reason}" if reason else "", "")])

    def epoch_done(self, row: _Row) -> None:
        columns = row.columns()
        if sum(len(heading) + 2 for heading, _ in columns) > self._console.width:
            for line in _wrapped(row.cells(), self._console.width):
                self._print([(line, "")])
            return
        heading = [heading for heading, _ in columns]
        if heading != self._heading or self._rows_since >= max(10, self._console.height - 8):
            self._heading, self._rows_since = heading, 0
            self._print([("\n" + "  ".join(heading), "bright_black")])
        self._rows_since += 1
        *cells, took = [said for _, said in columns]
        note = "  in part" if row.in_part else ""
        self._print([("  ".join(cells), ""), (f"  {took}{note}", "bright_black")])

    def close(self) -> None:
        try:
            self._ticker.stop()
        finally:  # a second Ctrl-C must not leave the terminal without its cursor
            if self._streams is not None:
                self._streams.give_back()
            self._live.stop()

    def _print(self, spans: Iterable[_Span]) -> None:
        from rich.text import Text

        self._console.print(Text.assemble(*spans), soft_wrap=True)

    def _tick(self) -> float:
        self._watch.look()
        self._live.refresh()
        return self._refresh_s


class _Frame:
    """What is drawn: the epoch with its bar, then the latest metrics; an evaluation's bar takes its metrics' place."""

    def __init__(self, watch: _Watch, *, ascii_only: bool = False) -> None:
        self._watch = watch
        self._marks = _ASCII if ascii_only else _LINES

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        lines = [[], *self.lines(options.max_width - 1)]
        for place, line in enumerate(lines):
            for text, style in line:
                yield Segment(text, console.get_style(style) if style else None)
            if place < len(lines) - 1:
                yield Segment.line()

    def lines(self, width: int) -> list[list[_Span]]:
        watch = self._watch
        run, evaluation = watch.run, watch.evaluation
        if not watch.training:
            stage, index = evaluation or (run.stage, None)
            return [self._evaluation(stage, index, f"{stage}  ", width)]
        epoch, step = _epoch_label(run), f"step {run.progress.steps:,}"
        margin = max(len(epoch), len(step))
        lines = [self._training(f"{epoch:>{margin}}  ", width)]
        stages = ["train", "val"] if run.evaluator is not None or "val" in run.lengths else ["train"]
        if evaluation is not None and evaluation[0] not in stages:
            stages.append(evaluation[0])
        column = max(map(len, stages))
        for stage in stages:
            label = f"{step if stage == 'train' else '':>{margin}}  {stage:<{column}}  "
            if evaluation is not None and evaluation[0] == stage:
                lines.append(self._evaluation(stage, evaluation[1], label, width))
                continue
            values = {n.removeprefix(f"{stage}/"): v for n, v in watch.metrics.items() if n.startswith(f"{stage}/")}
            lines.append([(label, "bright_black"), *_cells(values, width - len(label))])
        return lines

    def _training(self, label: str, width: int) -> list[_Span]:
        watch, run = self._watch, self._watch.run
        done, total = run.progress.batches_in_epoch, run.lengths.get("train")
        left_s = watch.left_s
        times = _clock(watch.elapsed_s) + (f" {self._marks.dot} {_clock(left_s)} left" if left_s is not None else "")
        ends = [f"  {_of(done, total)}", f"  {_rate(watch.rate):>14}" if watch.rate else "", f"  {times:>16}"]
        while len(ends) > 1 and width - len(label) - sum(map(len, ends)) < 10:
            ends.pop(1)  # narrow: the rate goes first, then the times
        room = width - len(label) - sum(map(len, ends))
        return [
            (label, "bold"),
            *self._bar(done, total, min(40, room)),
            (ends[0], ""),
            *((e, "bright_black") for e in ends[1:]),
        ]

    def _evaluation(self, stage: str, index: int | None, label: str, width: int) -> list[_Span]:
        total = None if index is None else self._watch.run.lengths.get(stage)
        count = "" if index is None else f"  {_of(index, total)}"
        bar = self._bar(index or 0, total, min(40, width - len(label) - len(count)))
        return [(label, "bright_black"), *bar, (count, "")]

    def _bar(self, done: int, total: int | None, width: int) -> list[_Span]:
        marks = self._marks
        if width < 4:
            return []
        if total is None:  # no end in sight: something that moves while batches are done
            size = max(2, width // 5)
            start = int(time.monotonic() * 8) % (width - size + 1)
            rest = width - size - start
            return [
                (marks.todo * start, "bright_black"),
                (marks.done * size, "cyan"),
                (marks.todo * rest, "bright_black"),
            ]
        halves = min(2 * width, round(2 * width * done / total)) if total else 0
        full, half = divmod(halves, 2)
        drawn = marks.done * full + marks.half * half
        return [(drawn, "green" if done >= total else "cyan"), (marks.todo * (width - len(drawn)), "bright_black")]


class _Marks(NamedTuple):
    done: str
    half: str
    todo: str
    dot: str


_LINES = _Marks("━", "╸", "─", "·")
_ASCII = _Marks("=", "-", ".", "|")
_STYLE_OF_STATUS = {"completed": "green", "stopped": "yellow", "interrupted": "yellow", "failed": "red"}


class _Streams:
    """Sends what is printed or logged to the terminal meanwhile above the live lines."""

    def __init__(self, console: Console) -> None:
        self._taken: dict[str, tuple[TextIO, _Above]] = {}
        self._handlers: list[tuple[logging.StreamHandler[Any], TextIO]] = []
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            # one that another display has taken is sent above already; one that goes to a file must go on doing so
            if stream is not None and not hasattr(stream, "rich_proxied_file") and stream.isatty():
                self._taken[name] = stream, _Above(stream, console)
                setattr(sys, name, self._taken[name][1])
        for handler in _stream_handlers():
            for stream, above in self._taken.values():
                if handler.stream is stream:
                    self._handlers.append((handler, stream))
                    handler.setStream(above)

    def give_back(self) -> None:
        for handler, stream in self._handlers:
            if isinstance(handler.stream, _Above):
                handler.setStream(stream)
        for name, (stream, above) in self._taken.items():
            if getattr(sys, name) is above:
                setattr(sys, name, stream)
            above.end()


class _Above(io.TextIOBase):
    """A stream whose whole lines appear above the live lines."""

    def __init__(self, stream: TextIO, console: Console) -> None:
        self.rich_proxied_file = stream  # so rich finds the real one, and does not write to itself
        self._console = console
        self._waiting = ""
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._ended = False

    def write(self, text: str) -> int:
        # a forked loader worker has a copy of the console, and maybe of its locks as they were held
        if self._ended or os.getpid() != self._process:
            return self.rich_proxied_file.write(text)
        with self._lock:
            whole, end, rest = (self._waiting + text).rpartition("\n")
            self._waiting = rest
            if end:
                self._print(whole)
        return len(text)

    def end(self) -> None:
        """From now on nothing is held back; what was is written."""
        with self._lock:
            self._ended = True
            rest, self._waiting = self._waiting, ""
        if rest:
            self._print(rest)

    def flush(self) -> None:
        self.rich_proxied_file.flush()

    def isatty(self) -> bool:
        return self.rich_proxied_file.isatty()

    def fileno(self) -> int:
        return self.rich_proxied_file.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.rich_proxied_file.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.rich_proxied_file.errors

    @property
    def buffer(self) -> Any:
        return self.rich_proxied_file.buffer

    def _print(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text.from_ansi(text), soft_wrap=True)


class _Ticker:
    """Calls a function on a thread of its own, again after as many seconds as it says, until stopped or it fails."""

    def __init__(self, tick: Callable[[], float]) -> None:
        self._tick = tick
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go, name="loopline-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(timeout=2.0)  # a device that hangs must not hold up the end

    def _go(self) -> None:
        wait_s = 0.0
        while not self._over.wait(wait_s):
            try:
                wait_s = self._tick()
            except Exception as error:
                if not self._over.is_set():
                    logger.warning("ProgressBar stops drawing: %s: %s", type(error).__name__, error, exc_info=error)
                return


def _draws_in_notebook(console: Console) -> bool:
    return console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    for logger in [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler):
                yield handler


def _device_of(run: Run) -> str:
    device = getattr(run.strategy, "device", None)
    if device is None:
        parameter = next(iter(run.model.parameters()), None) if hasattr(run.model, "parameters") else None
        device = getattr(parameter, "device", None)
    return getattr(device, "type", "cpu")


def _shown(metrics: dict[str, float]) -> dict[str, float]:
    """Those of training and validation; where there are none, whatever there is."""
    stages = {name: value for name, value in metrics.items() if name.startswith(("train/", "val/"))}
    return stages or metrics


def _evaluated(run: Run, values: dict[str, float], took_s: float) -> str:
    said = [f"{name} {number(value)}" for name, value in values.items()]
    return "  ".join([*(said or [run.stage]), _time(took_s)])


def _cells(values: dict[str, float], width: int) -> list[_Span]:
    """Names and numbers, as many as there is room for."""
    spans: list[_Span] = []
    for name, value in values.items():
        said = number(value)
        need = len(name) + 1 + len(said) + 2
        if need > width:
            return [*spans, ("…"[:width], "bright_black")] if width > 0 else spans
        spans += [(f"{name} ", "bright_black"), (f"{said}  ", "")]
        width -= need
    return spans


def _wrapped(cells: Sequence[str], width: int) -> list[str]:
    lines = [cells[0]]
    for cell in cells[1:]:
        if len(lines[-1]) + 2 + len(cell) > width:
            lines.append("   ")
        lines[-1] += f"  {cell}"
    return lines


def _epoch_label(run: Run) -> str:
    return f"epoch {_of(run.epoch + 1, run.limits.epochs)}"


def _of(done: int, total: int | None) -> str:
    return f"{done}" if total is None else f"{done:>{len(str(total))}}/{total}"


def _rate(per_s: float) -> str:
    if per_s < 1:
        return f"{1 / per_s:.1f} s/batch"
    return f"{per_s:,.0f} batches/s" if per_s >= 10 else f"{per_s:.1f} batches/s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else _clock(seconds)


def _count(count: int, unit: str) -> str:
    return f"{count:,} {unit}" + ("" if count == 1 else "s")
