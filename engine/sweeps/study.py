"""A search by Optuna, which asks for points and is told what they gave."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stampede.engine.sweeps.journal import open_journal
from stampede.engine.sweeps.points import Point, label, override
from stampede.engine.sweeps.runner import Outcome
from stampede.engine.sweeps.sections import ParameterSection, StudySection
from stampede.engine.sweeps.sweep import Sweep
from stampede.settings import SettingsError

if TYPE_CHECKING:
    import optuna

try:
    import optuna
    from optuna.trial import TrialState
except ImportError:
    optuna = None

# Attribute of Optuna's study: what its trials have in common.
_ASKED = "asked"


def run_study(sweep: Sweep, run_point: Callable[[Point], list[Outcome]]) -> list[Outcome]:
    """Run a study, or what is left of it.

    A point is the mean of its seeds. Optuna's journal is kept in `study.log`; the sampler begins
    anew at each trial with the study's seed plus the trial's number, so that a study that was
    killed while a trial was run goes on as it would have. If Optuna had not chosen all values of a
    trial, the next number takes its place.

    Args:
        sweep: with a study.
        run_point: runs the trials of a point, or says what became of them.

    Returns:
        What became of all trials, in order.

    Raises:
        SettingsError: Optuna is not installed, or the folder holds another study.
    """
    settings = sweep.study
    study = _open(sweep, settings)
    for trial in study.get_trials(states=[TrialState.RUNNING]):
        if trial not in _chosen(study, settings):
            # Killed before Optuna had chosen all values: no trial was run.
            study.tell(trial.number, state=TrialState.FAIL)
        else:
            _tell(study, trial.number, settings, run_point(_point(trial.number, trial.params)))
    while len(_chosen(study, settings)) < settings.trials:
        study.sampler = _sampler(settings, len(study.trials))
        trial = study.ask()
        params = {key: _suggest(trial, key, what) for key, what in settings.parameters.items()}
        _tell(study, trial.number, settings, run_point(_point(trial.number, params)))
    return [
        outcome
        for trial in _chosen(study, settings)[: settings.trials]
        for outcome in run_point(_point(trial.number, trial.params))
    ]


def check_optuna() -> None:
    """Check that Optuna is installed.

    Raises:
        SettingsError: it is not.
    """
    if optuna is None:
        raise SettingsError(
            "a study needs Optuna, which is not installed; `pip install 'optuna>=4,<5'`, or write "
            "a grid"
        )


def _open(sweep: Sweep, settings: StudySection) -> optuna.Study:
    check_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=open_journal(sweep.folder),
        # Not the file's, which may be renamed.
        study_name="study",
        direction=settings.direction,
        load_if_exists=True,
    )
    # More trials may follow; anything else makes another study.
    asked = {
        **settings.model_dump(mode="json", exclude={"trials"}),
        "seeds": list(sweep.seeds),
        "overrides": list(sweep.overrides),
    }
    before = study.user_attrs.get(_ASKED, asked)
    if before != asked:
        changed = [key for key in asked if before.get(key) != asked[key]]
        raise SettingsError(
            f"{sweep.folder} holds a study with another {', '.join(changed)}; write another --out"
        )
    study.set_user_attr(_ASKED, asked)
    return study


def _chosen(study: optuna.Study, settings: StudySection) -> list[optuna.trial.FrozenTrial]:
    """Trials whose values were all chosen, run or not."""
    return [trial for trial in study.trials if trial.params.keys() == settings.parameters.keys()]


def _sampler(settings: StudySection, number: int) -> optuna.samplers.BaseSampler:
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    return samplers[settings.sampler](seed=settings.seed + number)


def _suggest(trial: optuna.Trial, key: str, what: ParameterSection) -> Any:
    if what.choices:
        return trial.suggest_categorical(key, what.choices)
    if what.whole:
        return trial.suggest_int(key, what.low, what.high, log=what.log)
    return trial.suggest_float(key, what.low, what.high, log=what.log)


def _point(number: int, params: dict[str, Any]) -> Point:
    labels = {key: _short(value) for key, value in params.items()}
    overrides = tuple(override(key, value) for key, value in params.items())
    return Point(labels, overrides, name=f"trial{number:04d}")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else label(value)


def _tell(
    study: optuna.Study, number: int, settings: StudySection, outcomes: list[Outcome]
) -> None:
    if any(outcome.message for outcome in outcomes):
        study.tell(number, state=TrialState.FAIL)
    else:
        found = [outcome.sought(settings.metric) for outcome in outcomes]
        study.tell(number, statistics.mean(found))
