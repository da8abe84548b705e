"""F17: whatever happens to a run, its last and best checkpoints are there at every instant."""

import math
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clipctl.runs import retention
from clipctl.runs.checkpoint import NEEDED, Checkpoint, Manifest
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from tests.test_runs import NO_TENSORS

HISTORIES = 1000

scores = st.one_of(st.none(), st.just(math.nan), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
# A history: steps forward with a score, a kill and resume from the newest, or going back to an older checkpoint.
events = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(0, 3), scores),
        st.tuples(st.just("resume"), st.integers(0, 5), st.none()),
    ),
    min_size=1,
    max_size=12,
)


def checkpoint(step, beginnings, score, again=0):
    name = f"step-{step:08d}" + (f".{again}" if again else "")
    manifest = Manifest(
        schema=1,
        run_id="run",
        beginnings=[list(pair) for pair in beginnings],
        step=step,
        epoch=0,
        saved_s=0,
        metrics={} if score is None else {"score": score},
        files={},
    )
    return Checkpoint(Path(name), manifest)


@settings(max_examples=HISTORIES, deadline=None)
@given(events=events, keep_last=st.integers(1, 3), keep_best=st.integers(0, 2))
def test_the_last_and_the_best_survive_every_history(events, keep_last, keep_best):
    """Against a model: the way to where the run is now, as a list of steps, and all scores ever kept."""
    there: list[Checkpoint] = []
    way: list[Checkpoint] = []
    attempt, step, beginnings = 1, 0, [(1, 0)]
    for kind, number, score in events:
        if kind == "resume":
            attempt += 1
            way = way[: max(0, len(way) - number)]
            step = way[-1].step if way else 0
            led_here = [tuple(pair) for pair in way[-1].manifest.beginnings] if way else []
            beginnings = [*led_here, (attempt, step)]
            if not way:  # nothing to go back to: the run starts over
                there = []
            continue
        step += number
        again = 1 + max((one.again for one in there if one.step == step), default=-1)
        saved = checkpoint(step, beginnings, score, again)
        way = [one for one in way if one.step != step] + [saved]
        there.append(saved)
        keep = retention.kept(there, last=keep_last, best=keep_best)
        assert all(one in keep for one in way[-keep_last:]) and retention.course(keep)[-1] == way[-1]
        numbers = [value for one in there if (value := one.manifest.metrics.get("score")) is not None]
        best = max((value for value in numbers if math.isfinite(value)), default=None)
        if best is not None and keep_best:
            assert best in [one.manifest.metrics.get("score") for one in keep]
        assert len(keep) <= keep_last + keep_best
        there = keep
        way = [one for one in way if one in keep]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(numbers=st.lists(scores, min_size=1, max_size=6), keep_last=st.integers(1, 3))
def test_on_the_disk_as_in_the_model(numbers, keep_last):
    with TemporaryDirectory() as directory:
        run = RunDir.create(Path(directory), "tiny", "run")
        store = CheckpointStore(run, keep_last=keep_last, keep_best=1)
        finite = []
        for step, score in enumerate(numbers, start=1):
            store.save(
                lambda path: [(path / name).write_bytes(NO_TENSORS) for name in NEEDED] and None,
                step=step,
                epoch=step,
                metrics={"score": score},
            )
            found = {one.step: one for one in store.all()}
            assert all(not one.problems() for one in found.values())
            assert set(range(max(1, step - keep_last + 1), step + 1)) <= set(found)
            finite += [score] if score is not None and math.isfinite(score) else []
            best = store.best()
            assert (best is None) == (not finite)
            assert best is None or best.manifest.metrics["score"] == max(finite)
            assert len(found) <= keep_last + 1
        run.release()
