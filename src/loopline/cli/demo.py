"""`loopline demo`: a real small model, trained from beginning to end in a few seconds, with nothing to download."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ..callbacks import EarlyStopping, ModelSummary, SaveBest
from ..sinks import CsvSink, JsonlSink
from ..task import SupervisedTask
from ..trainer import Trainer

if TYPE_CHECKING:
    from ..core.run import Run

__all__ = ["Digits", "accuracy", "add_to", "digits", "new_model", "run", "validate"]

_FILES = ("metrics.jsonl", "metrics.csv", "best.safetensors", "last.safetensors")


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `demo` to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small real model in a few seconds",
        description="Train a small convolutional network on scikit-learn's 1797 handwritten digits, which come with "
        "scikit-learn. Metrics and weights go into a folder; running it again replaces them.",
        epilog="exit codes: 0 trained, 1 could not train, 2 wrong command line, 130 interrupted",
    )
    parser.add_argument("--epochs", type=_count, default=20, metavar="N", help="train at most N epochs (default: 20)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/demo"), help="where the results go (default: runs/demo)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed of weights and order (default: 0)")
    parser.add_argument("--no-bar", action="store_true", help="show no progress while training")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, and say where the results are."""
    if importlib.util.find_spec("sklearn") is None:
        return _failed(
            "The demo trains on scikit-learn's digits, and scikit-learn is missing: pip install 'loopline[demo]'"
        )
    folder: Path = args.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        return _failed(f"Cannot write into {folder}: {error.strerror or error}. Choose another place with --folder.")
    best = SaveBest(folder, metric="val/accuracy", mode="max")
    data = digits()
    trainer = Trainer(
        _task(new_model(args.seed)),
        callbacks=[ModelSummary(example=data.val_images[:1]), EarlyStopping("val/loss", patience=3), best],
        sinks=[JsonlSink(folder / "metrics.jsonl"), CsvSink(folder / "metrics.csv")],
        progress=not args.no_bar,
        seed=args.seed,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing from a second one, and on a busy machine waits for it
    try:
        done = trainer.fit(*data.loaders(), epochs=args.epochs)
    except KeyboardInterrupt:
        print(f"\nWhat was measured until now is in {folder}.\nBegin again with: {_command()} demo")
        return 130
    finally:
        torch.set_num_threads(threads)
    print(_report(done, best, folder))
    return 0


class Digits(NamedTuple):
    """Handwritten digits as images of 8 x 8 pixels between 0 and 1, and what they show."""

    train_images: Tensor
    train_labels: Tensor
    val_images: Tensor
    val_labels: Tensor

    def loaders(self) -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
        """Batches for training, in a new order each epoch, and for validation."""
        train = TensorDataset(self.train_images, self.train_labels)
        val = TensorDataset(self.val_images, self.val_labels)
        return DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=120)


def digits() -> Digits:
    """Scikit-learn's 1797 digits; every fifth one is kept for validation."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target, dtype=torch.long)
    val = torch.arange(len(labels)) % 5 == 0
    return Digits(images[~val], labels[~val], images[val], labels[val])


def new_model(seed: int = 0) -> nn.Module:
    """A small convolutional network for images of 8 x 8 pixels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(512, 10),
        )


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of the samples whose largest output is the right one."""
    return (output.argmax(1) == target).float().mean()


def validate(path: str | Path) -> float:
    """The accuracy that the weights in a file have on the validation digits."""
    from safetensors.torch import load_file

    model = new_model()
    model.load_state_dict(load_file(path))
    _, val_loader = digits().loaders()
    return Trainer(_task(model), progress=False).validate(val_loader)["val/accuracy"]


def _task(model: nn.Module) -> SupervisedTask:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return SupervisedTask(model, loss=nn.CrossEntropyLoss(), optimizer=optimizer, metrics={"accuracy": accuracy})


def _report(done: Run, best: SaveBest, folder: Path) -> str:
    if best.best_value is None or best.best_epoch is None:
        said = "The validation accuracy never was a number, so no best weights were kept."
    else:
        said = (
            f"Validation accuracy {best.best_value:.1%}, best in epoch {best.best_epoch + 1} of {done.progress.epochs}."
        )
    again = shlex.quote(f"{folder}-1")
    use = f"from loopline.cli.demo import validate; print(validate({str(folder / 'best.safetensors')!r}))"
    results = f"""
        {said}

        {folder / "metrics.csv"}, {folder / "metrics.jsonl"}
          every metric by step and epoch
        {folder / "best.safetensors"}, {folder / "last.safetensors"}
          the weights of the best epoch and of the last

        Three things to try next

        1. Load the best weights and measure them again:
             {_python()} -c {_quoted(use)}
        2. Train with another seed, and compare the two tables:
             {_command()} demo --seed 1 --folder {again}
        3. Train a model of your own; this runs as it is:
"""
    own = """
        from torch import nn, optim
        from loopline import SupervisedTask, Trainer
        from loopline.cli.demo import accuracy, digits

        train, val = digits().loaders()
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        task = SupervisedTask(
            model,
            loss=nn.CrossEntropyLoss(),
            optimizer=optim.AdamW(model.parameters(), lr=0.01),
            metrics={"accuracy": accuracy},
        )
        Trainer(task).fit(train, val, epochs=5)
"""
    return textwrap.dedent(results) + textwrap.indent(textwrap.dedent(own), "     ").rstrip()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 1 or more")
    return int(text)


def _failed(sentence: str) -> int:
    print(f"loopline demo: {sentence}", file=sys.stderr)
    return 1


def _command() -> str:
    """How this command line can be called again from here."""
    return _callable("loopline") or f"{_python()} -m loopline"


def _python() -> str:
    return _callable("python") or shlex.quote(sys.executable)


def _callable(name: str) -> str | None:
    """The shortest way to call a program that stands beside the Python that runs this."""
    # not resolved: in a virtual environment Python is a link to one that knows nothing of the environment
    beside = Path(sys.executable).absolute().parent / name
    if (found := shutil.which(name)) is not None and Path(found).absolute() == beside:
        return name
    if not beside.exists():
        return None
    near = beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside
    return shlex.quote(str(near))


def _quoted(code: str) -> str:
    return f'"{code}"' if not set(code) & set('"$`\\!') else shlex.quote(code)
