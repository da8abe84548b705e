"""Displays a training run: its plan, its progress, its result."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from clipctl.cli.output import plain
from clipctl.cli.views import units
from clipctl.config.quantities import counted

if TYPE_CHECKING:
    from clipctl.runs.retrieval import Retrieval
    from clipctl.training.attempt import TrainSummary
    from clipctl.training.journal import Progress
    from clipctl.training.plan import Alternative, TrainPlan


def plan_table(plan: "TrainPlan") -> Table:
    config, data, schedule, placement = plan.config, plan.data, plan.schedule, plan.placement
    image, text = config.model.image, config.model.text
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    workload = plan.forecast.workload
    in_parts = f" in micro-batches of {workload.kept_pairs}" if workload.kept_pairs < workload.batch_size else ""
    trained, name = plan.forecast.trained_parameters, "by recipe" if plan.alternatives else config.preset
    only = f", {trained:,} of them trained" if config.tune.is_partial else ""
    rows = {
        "model": f"{plan.base.identity.name if plan.base else name}, {plan.forecast.parameters:,} parameters{only}: "
        f"image {image.words}, "
        f"text {text.width}×{text.depth}, vocabulary {text.vocab_size:,}",
        "data": f"{', '.join(config.data.source)}: {len(data.train):,} pictures to train on, "
        f"{len(data.val):,} held out",
        **({} if data.train.is_drawn else {"format": "\n".join(data.words)}),
        **({"recipe": "\n".join(plan.recipe)} if plan.recipe else {}),
        **({"choices": "\n".join(map(alternative_line, plan.alternatives))} if plan.alternatives else {}),
        **({"features": features_line(plan)} if config.tune.has_features else {}),
        "device": f"{placement.device.kind} ({placement.device.name}) – {placement.device.reason}",
        "precision": f"{placement.precision.value} – {placement.precision.reason}",
        **(
            {"attention": f"{placement.attention.value} – {placement.attention.reason}"}
            if plan.forecast.workload.attention_shapes
            else {}
        ),
        **({"processes": processes_line(plan)} if placement.ranks > 1 else {}),
        "threads": f"{placement.threads.value} – {placement.threads.reason}",
        "workers": f"{placement.workers.value} – {placement.workers.reason}",
        **({} if data.train.is_drawn else {"cache": f"{data.cache.value} – {data.cache.reason}"}),
        "steps": f"{schedule.total_steps:,}: {counted(schedule.epochs, 'epoch')} of {schedule.steps_per_epoch:,}, "
        f"batch size {schedule.batch_pairs}{in_parts}, peak learning rate {config.optim.lr:g}",
        "time": time_line(plan),
        "memory": memory_line(plan),
        "checkpoints": f"every {units.save_interval(config.save.every)}, about "
        f"{units.size(plan.forecast.checkpoint_bytes)} each; kept: the last {config.save.keep_last}, "
        f"the best {config.save.keep_best}",
    }
    if config.train.loss == "softmax":
        rows["chance loss"] = (
            f"ln {schedule.batch_pairs} = {schedule.chance_loss:.3f}; if the loss stays there, nothing is being learnt"
        )
    for label, value in rows.items():
        table.add_row(label, plain(value))
    problem = plan.memory_problem()
    for note in (*plan.notes, *([f"{problem}; {problem.hint}"] if problem else [])):
        table.add_row("note", plain(note, style="yellow"))
    return table


def alternative_line(one: "Alternative") -> str:
    chosen = " (chosen)" if one.is_chosen else ""
    return f"{one.model}: {counted(round(one.epochs), 'epoch')} in {units.duration(one.seconds)}{chosen}"


def features_line(plan: "TrainPlan") -> str:
    tune = plan.config.tune
    towers = " and ".join(tune.locked)
    views = f" of {tune.views} views" if "image" in tune.locked and (tune.views or 1) > 1 else ""
    once = f", in about {units.duration(plan.forecast.features_s)}" if plan.forecast.features_s else ""
    return f"{towers} tower locked: its features{views} are computed once{once}, and kept"


def memory_line(plan: "TrainPlan") -> str:
    need, total = plan.forecast.memory, plan.forecast.memory_need
    program = f", program {units.size(need.process_bytes)}" if need.process_bytes else ""
    return (
        f"about {units.size(total.value)} of {units.size(plan.placement.device.memory_bytes)} free – "
        f"{units.basis(total.basis)} (weights {units.size(need.weights_bytes)}, "
        f"gradients {units.size(need.gradients_bytes)}, optimizer {units.size(need.optimizer_bytes)}, "
        f"activations {units.size(need.activations_bytes)}{program})"
    )


def processes_line(plan: "TrainPlan") -> str:
    each = plan.forecast.workload.batch_size
    split = "; the model is sharded across them" if plan.config.runtime.shard else ""
    return f"{plan.placement.ranks} training together, each with up to {each} pairs of every batch{split}"


def time_line(plan: "TrainPlan") -> str:
    step_s = plan.forecast.step_s
    if plan.seconds is None or step_s is None:
        return "unknown: nothing has been measured on this device yet; run clipctl bench"
    low, high = units.duration(plan.seconds.low), units.duration(plan.seconds.high)
    about = "from now on about" if plan.deadline_s else "about"
    return (
        f"{about} {units.duration(plan.seconds.value)} ({low} to {high}), {units.seconds(step_s.value)} per step – "
        f"{BASIS_WORDS.get(step_s.basis, step_s.basis)}"
    )


BASIS_WORDS = {"prior": "rough estimate; run clipctl bench to refine it"}


def plan_document(plan: "TrainPlan") -> dict[str, Any]:
    from clipctl.config.layers import to_dict

    return {
        "parameters": plan.forecast.parameters,
        "trained_parameters": plan.forecast.trained_parameters,
        "features_s": plan.forecast.features_s,
        "train_pairs": len(plan.data.train),
        "val_pairs": len(plan.data.val),
        "understood": list(plan.data.words),
        "cache": plan.data.cache.value,
        "loss_floor": plan.data.loss_floor,
        "device": plan.placement.device.kind,
        "device_reason": plan.placement.device.reason,
        "precision": plan.placement.precision.value,
        "processes": plan.placement.ranks,
        "threads": plan.placement.threads.value,
        "workers": plan.placement.workers.value,
        "decided_s": plan.placement.decided_s,
        "recipe": list(plan.recipe),
        "alternatives": [asdict(one) for one in plan.alternatives],
        "steps": plan.schedule.total_steps,
        "epochs": plan.schedule.epochs,
        "steps_per_epoch": plan.schedule.steps_per_epoch,
        "chance_loss": plan.schedule.chance_loss,
        "step_s": plan.forecast.step_s.to_dict() if plan.forecast.step_s else None,
        "seconds": plan.seconds.to_dict() if plan.seconds else None,
        "memory": {
            **asdict(plan.forecast.memory),
            "total_bytes": plan.forecast.memory_need.value,
            "basis": plan.forecast.memory_need.basis,
        },
        "memory_free_bytes": plan.placement.device.memory_bytes,
        "notes": list(plan.notes),
        "config": to_dict(plan.config),
    }


PROGRESS_HEADER = f"{'epoch':>9} {'step':>13} {'loss':>8} {'accuracy':>9} {'val R@1':>8} {'images/s':>9} {'left':>8}"


def progress_row(progress: "Progress") -> str:
    score = progress.evaluation.score if progress.evaluation else None
    return (
        f"{f'{progress.epoch}/{progress.epochs}':>9} {f'{progress.step}/{progress.total_steps}':>13} "
        f"{progress.loss:>8.3f} {units.percent(progress.accuracy):>9} {units.percent(score):>8} "
        f"{progress.images_per_s:>9.1f} {units.duration(progress.eta_s):>8}"
    )


class RowRhythm:
    """When a row of progress is due: the first and the last; in between after evaluations and every ten seconds,
    but no more than about fifty in a run; and at least one a minute."""

    EVALUATED_S, QUIET_S, LONGEST_S, SHARE = 5.0, 10.0, 60.0, 0.02

    def __init__(self) -> None:
        self._last: tuple[Progress, float] | None = None

    def is_due(self, progress: "Progress", now_s: float) -> bool:
        if self._last is not None and progress.step < progress.total_steps:
            last, last_s = self._last
            waited_s = now_s - last_s
            is_news = waited_s >= (self.QUIET_S if progress.evaluation is last.evaluation else self.EVALUATED_S)
            is_far = progress.step - last.step >= self.SHARE * progress.total_steps
            if not (is_news and is_far) and waited_s < self.LONGEST_S:
                return False
        self._last = progress, now_s
        return True


def summary_text(summary: "TrainSummary") -> str:
    """The result, and where it is."""
    pairs = summary.val_pairs
    captions = round(summary.t2i_r1 * summary.val_captions)
    pictures = round(summary.i2t_r1 * pairs)
    found = (
        f"{pictures:,} of {pairs:,} unseen pictures matched to {'their' if summary.val_captions == pairs else 'a'} "
        f"caption, {captions:,} of {summary.val_captions:,} captions matched to their picture"
    )
    score, best = (summary.i2t_r1 + summary.t2i_r1) / 2, (summary.best_i2t_r1 + summary.best_t2i_r1) / 2
    chance = units.percent(summary.chance_r1)
    return "\n".join(
        [
            f"trained {units.count(summary.parameters)} parameters in {units.duration(summary.seconds)} on "
            f"{summary.device}: {counted(summary.steps, 'step')}, {summary.images_per_s:.0f} images/s, "
            f"peak memory {units.size(summary.peak_memory_bytes)}",
            f"{found}: R@1 {units.percent(score)} (best {units.percent(best)}, chance {chance})",
            *start_lines(summary),
            *baseline_lines(summary),
            *improvement_lines(summary),
            f"saved in {summary.run}",
        ]
    )


SHOWN_EXAMPLES = 3


def example_lines(found: "Retrieval") -> list[str]:
    """The three captions whose picture is found best, and the three worst, if there are that many."""
    ordered = found.ordered()
    if len(ordered) < 2 * SHOWN_EXAMPLES:
        return []
    shown = [*ordered[:SHOWN_EXAMPLES], *ordered[-SHOWN_EXAMPLES:]]
    lines = [
        f"  {'✓' if query.rank == 1 else '✗'} {query.caption[:70]} → {query.rank:,} of {found.candidates:,}"
        for query in shown
    ]
    return ["captions of unseen pictures, and where their picture ranks:", *lines, ""]


EARLY_SHARE = 0.75  # of a run: a best result before that was not improved on for long


def improvement_lines(summary: "TrainSummary") -> list[str]:
    """When the model stopped improving, if that was well before the end."""
    if not 0 < summary.best_epoch < EARLY_SHARE * summary.epochs and not summary.is_stopped_early:
        return []
    sooner = "" if summary.is_stopped_early else "--patience 5 stops sooner; "
    return [
        f"no improvement on unseen pictures after epoch {summary.best_epoch:,} of {summary.epochs:,}. RUN@best has the "
        f"weights of that epoch; {sooner}more pictures would help more than longer training"
    ]


def start_lines(summary: "TrainSummary") -> list[str]:
    """The result beside the model that the run started from."""
    if summary.start_i2t_r1 is None or summary.start_t2i_r1 is None:
        return []
    start, best = (summary.start_i2t_r1 + summary.start_t2i_r1) / 2, (summary.best_i2t_r1 + summary.best_t2i_r1) / 2
    verdict = "" if best > start else ": training did not improve it, and RUN@best is the model from before training"
    return [f"before training R@1 was {units.percent(start)}, at its best it is {units.percent(best)}{verdict}"]


def baseline_lines(summary: "TrainSummary") -> list[str]:
    """The result beside the baseline that needs no training."""
    if summary.baseline_r1 is None:
        return []
    without, found = summary.baseline_r1, summary.best_i2t_r1
    verdict = "" if found > without else ": the model is worse than this baseline; give it more time or more pictures"
    return [
        "baseline without training: the nearest training picture by pixels has a right caption for "
        f"{units.percent(without)} of unseen pictures; the model reaches {units.percent(found)} at its best{verdict}"
    ]


def bad_pictures_text(reasons: dict[str, str]) -> Text:
    """How many could not be used, and which."""
    from clipctl.data.bad import bad_counts, bad_lines

    noun = "picture" if len(reasons) == 1 else "pictures"
    first = f"warning: {len(reasons):,} {noun} could not be used ({bad_counts(reasons.values())}):"
    return plain("\n  ".join([first, *bad_lines(reasons)]), style="yellow")
