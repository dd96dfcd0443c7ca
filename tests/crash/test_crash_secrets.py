"""A25: nothing that a run is given in confidence is in its folder or log, but what a state itself was made to hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CANARY = "c4n4ry"
PROGRAM = """
import logging, os, sys
from dataclasses import dataclass
import torch
from torch import nn
from loopline import Callback, Every, SupervisedTask, Trainer
from loopline.checkpoint import Best, Checkpointer, Latest
from loopline.testing import tiny_loader

logging.basicConfig(level="DEBUG")
CANARY = os.environ["HF_TOKEN"]


@dataclass
class Config:
    rate: float
    hub_token: str
    url: str


class Uploads(Callback):
    # holds a secret to work with, and keeps none of it
    def __init__(self, token):
        self.token, self.count = token, 0

    def on_epoch_end(self, run):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Diary(Callback):
    # its state is its own affair
    def state_dict(self):
        kept = sys.argv[2]
        if kept == "value and key":
            return {"note": CANARY, CANARY: 1}
        if kept == "object":
            return {"config": Config(0.1, hub_token=CANARY, url="https://me:c4n4ry@host/x")}
        return {"note": "nothing"}

    def load_state_dict(self, state):
        pass


model = nn.Linear(4, 2)
task = SupervisedTask(model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.Adam(model.parameters()))
task.config = Config(0.1, hub_token=CANARY, url=f"https://me:{CANARY}@host/x?sig={CANARY}")
task.api_key = CANARY
checkpointer = Checkpointer(sys.argv[1], when=Every(steps=1), keep=Latest(3) | Best(1, "val/loss"))
trainer = Trainer(task, progress=False, checkpoint=checkpointer, callbacks=[Uploads(CANARY), Diary()])
trainer.fit(tiny_loader(2), tiny_loader(1), epochs=2)
"""
IN_CONFIDENCE = [
    "--token",
    CANARY,
    f"--api-key={CANARY}",
    f"logger.password={CANARY}",
    f"--data=https://me:{CANARY}@host/x?X-Amz-Signature={CANARY}",
    "--header",
    f"Authorization: Bearer {CANARY}",
]


def train(folder: Path, kept: str, *words: str) -> tuple[int, str, dict[str, bytes]]:
    """Train in a process with secrets all around: its exit code, what it printed, and every file that it left."""
    names = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_SETTING")
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), kept, *words],
        env=os.environ | dict.fromkeys(names, CANARY),
        capture_output=True,
        text=True,
        check=False,
    )
    left = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    return ended.returncode, ended.stdout + ended.stderr, left


def with_canary(left: dict[str, bytes]) -> set[str]:
    """The files that hold it, or have it in their names; of a checkpoint without the checkpoint's own name."""
    forms = {CANARY.encode(), CANARY.encode().hex().encode(), CANARY.encode("utf-16-le")}
    found = {path for path, data in left.items() if CANARY in path or any(form in data for form in forms)}
    return {path.split("/", 2)[2] if path.startswith("checkpoints/") else path for path in found}


def test_no_secret_of_environment_command_task_or_callback_is_in_the_folder_or_the_log(tmp_path):
    code, printed, left = train(tmp_path / "run", "nothing", *IN_CONFIDENCE)
    kinds = {path.split("/")[0] for path in left}
    assert (code, with_canary(left), CANARY in printed) == (0, set(), False)
    assert kinds >= {"run.json", "LOCK", "checkpoints", "pins"}
    assert sum(path.endswith("MANIFEST.json") for path in left) >= 3


def test_what_a_callbacks_own_state_holds_is_kept_as_it_is_and_nowhere_else(tmp_path):
    """Here is the line: a state is what its owner says that it is, and it is kept to the last bit, keys and all."""
    code, printed, left = train(tmp_path / "run", "value and key")
    assert (code, with_canary(left), CANARY in printed) == (0, {"global.json"}, False)


def test_a_state_that_cannot_be_kept_is_told_of_without_its_secrets(tmp_path):
    code, printed, left = train(tmp_path / "run", "object")
    assert (code, "CannotSave" in printed, "hub_token='***'" in printed) == (1, True, True)
    assert (with_canary(left), CANARY in printed.replace(PROGRAM, "")) == (set(), False)


def test_a_word_of_the_command_that_nothing_calls_a_secret_is_found(tmp_path):
    """The check itself, and the other line: a secret that stands alone cannot be told from a file's name."""
    _, _, left = train(tmp_path / "run", "nothing", CANARY)
    assert {path.split("-")[0] for path in with_canary(left)} == {"LEASE"}
