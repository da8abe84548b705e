"""What a locked tower costs when its features are kept, against when they are not: `small`, 500 pictures, in one run.

    python benchmarks/features.py [--preset small] [--pictures 500] [--steps 6]

Three comparisons, steps of each pair in turns, medians:
- image tower locked, features kept: a step, against a step of the text tower's own training (bar: 1.1 ×)
- both towers locked, features kept: a step, against the same without kept features (bar: 50 × faster)
- the losses of both, which must agree within 1e-5
"""

import argparse
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

from clipctl.config.layers import Layer
from clipctl.model.loss import LOSSES, Embeddings
from clipctl.runs.rundir import RunDir
from clipctl.training.attempt import make_loader, make_state
from clipctl.training.features import featured
from clipctl.training.session import prepare
from clipctl.training.step import train_step, update


def make_base(preset, root):
    """A model as a run leaves it, without training it: the weights do not matter for time."""
    values = {"preset": preset, "data.source": "synthetic:40", "train.steps": 1, "recipe": "plain"}
    prepare([Layer("benchmark", values)], root, name="base").train()
    return RunDir(root / "base").path


def session_of(base, pictures, root, **values):
    asked = {"data.source": f"synthetic:{pictures}", "tune.base": str(base), "train.batch_size": 64, **values}
    return prepare([Layer("benchmark", asked)], root)


def text_step(state, batch):
    """The text tower's own training: its forward and backward pass against fixed picture embeddings, and an update."""
    state.optimizer.zero_grad(set_to_none=True)
    text = state.model.encode_text(batch.tokens)
    image = torch.nn.functional.normalize(torch.ones_like(text).cumsum(0), dim=-1)
    loss = LOSSES["softmax"](Embeddings(image, text, state.model.log_scale.exp(), None), None)
    loss.backward()
    update(state, loss.detach(), lr=1e-6)


def timed(works, rounds):
    times = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            before = time.perf_counter()
            work()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - before)
    return {name: statistics.median(found) for name, found in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--pictures", type=int, default=500)
    parser.add_argument("--steps", type=int, default=6)
    asked = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {asked.preset}\n")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        base = make_base(asked.preset, root)
        for lock in ("image", "both"):
            plan = session_of(base, asked.pictures, root, **{"tune.lock": lock, "tune.views": 1}).plan
            state, other = make_state(plan), make_state(plan)
            batch = next(iter(make_loader(plan).epoch(1)))
            before = time.perf_counter()
            kept = featured(plan, state, batch)
            print(f"{lock} locked: features of {len(batch.images)} pairs in {time.perf_counter() - before:.2f} s")
            losses = [float(train_step(one, some, lr=0.0).loss) for one, some in ((state, kept), (other, batch))]
            works = {"kept": lambda kept=kept, state=state: train_step(state, kept, lr=1e-6)}
            if lock == "image":
                works["text alone"] = lambda state=other, batch=batch: text_step(state, batch)
            else:
                works["not kept"] = lambda state=other, batch=batch: train_step(state, batch, lr=1e-6)
            medians = timed(works, asked.steps)
            words = ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in medians.items())
            ratio = (
                medians["kept"] / medians["text alone"] if lock == "image" else medians["not kept"] / medians["kept"]
            )
            what = "× the text tower's own" if lock == "image" else "× faster than not kept"
            print(f"  {words}: {ratio:.2f} {what}; losses differ by {abs(losses[0] - losses[1]):.1e}")


if __name__ == "__main__":
    main()
