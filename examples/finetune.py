"""From scratch, or from a model that knows something similar? Pretrain on one half of the built-in world, fine-tune on
the other half in other colours, merge the two, and judge all of them on both halves and on their mixture.

    python examples/finetune.py [DIRECTORY]        (about five minutes on 2 cores)

The halves: scenes with nature and animals, as they are drawn, and scenes with towns and food in exchanged colours, of
which there are few. All that is printed is R@1, the mean of both directions, on pictures that no model was trained on.
"""

import csv
import sys
import tempfile
from pathlib import Path

from PIL import Image

import clipctl
from clipctl.data.synthetic.scenes import SyntheticSource
from clipctl.inference.merging import candidates, data_to_judge_by, read_models

KNOWN, SHIFTED = ("nature", "animals"), ("urban", "food")
PRETRAINED_ON, FINE_TUNED_ON, HELD_OUT = 3000, 150, 150
PRETRAIN_S, SECONDS = 75, 30
ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def draw(directory: Path, name: str, categories: tuple[str, ...], count: int, *, held_out: bool) -> list[list[str]]:
    """Pictures of these categories, and a table of them. Shifted ones have red, green and blue exchanged."""
    source = SyntheticSource(20 * count if count > 200 else 2000, seed=1, validation=held_out)
    rows = []
    for number in range(len(source)):
        if source.category(number) in categories and len(rows) < count:
            picture = source.square(number, 64)
            if categories == SHIFTED:
                red, green, blue = picture.split()
                picture = Image.merge("RGB", (green, blue, red))
            file = directory / f"{name}-{number}.png"
            picture.save(file)
            rows.append([str(file), source.caption(number, 0)])
    return rows


def table(directory: Path, name: str, rows: list[list[str]]) -> str:
    with open(directory / f"{name}.csv", "w", newline="") as file:
        csv.writer(file).writerows([["filepath", "caption"], *rows])
    return str(directory / f"{name}.csv")


def main(directory: Path) -> None:
    pictures = directory / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    known, shifted = (
        draw(pictures, name, categories, count, held_out=False)
        for name, categories, count in (("known", KNOWN, PRETRAINED_ON), ("shifted", SHIFTED, FINE_TUNED_ON))
    )
    judged = {
        name: draw(pictures, f"{name}-val", part, HELD_OUT, held_out=True)
        for name, part in (("known", KNOWN), ("shifted", SHIFTED))
    }
    tables = {name: table(directory, f"{name}-val", rows) for name, rows in judged.items()}
    tables["mixture"] = table(directory, "mixture-val", [*judged["known"], *judged["shifted"]])
    new = table(directory, "shifted", shifted)
    runs = directory / "runs"

    def train(name: str, data: str, seconds: int, **settings: object) -> Path:
        shared = {"layout": "clip", "train.time": f"{seconds}s", "data.val": tables[settings.pop("val", "shifted")]}
        return Path(clipctl.train(data, {**shared, **settings}, runs_dir=runs, name=name).run)

    # Words that only the new half has are learnt from a few pictures of it, so that both halves share a vocabulary.
    base = train("base", table(directory, "known", [*known, *shifted[:30]]), PRETRAIN_S, val="known")
    scratch = train("scratch", new, SECONDS)
    tuned = train("tuned", new, SECONDS, **{"tune.base": str(base)})

    print(f"{'R@1 on':<28} {'known':>8} {'shifted':>8} {'mixture':>8}")
    for name, run in (("from scratch", scratch), ("the base (step 0)", base), ("fine-tuned", tuned)):
        scores = [clipctl.evaluate(str(run), data) for data in tables.values()]
        print(f"{name:<28} " + " ".join(f"{100 * one.score:>6.1f}%" for one in scores))
    models = read_models(runs, [str(base), str(tuned)])
    for alpha in ALPHAS:
        found = [
            candidates(models, [alpha], data_to_judge_by(models, [data]), lambda done, total: None)[0].scores["score"]
            for data in tables.values()
        ]
        print(f"{f'merged, alpha {alpha:g}':<28} " + " ".join(f"{100 * one:>6.1f}%" for one in found))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as place:
            main(Path(place))
