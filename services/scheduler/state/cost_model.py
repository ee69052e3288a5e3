"""`CostModel` predicts the time of a step, and `StepPace` measures the throughput of an executor.

The prediction has the form of `shared.step_model`: a linear function of a step's rows, its tokens (steeper
where the machine becomes compute-bound), the cached tokens that it reads and the query-key pairs of its
chunks. `results` feeds both from step results. Everything here is + - * / sqrt and comparison, so a replay of
the same events finds the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from math import sqrt
from operator import add, mul

from shared.step_model import StepShape

KNOTS = (16, 256)  # tokens above which each may take longer: up to there reading the weights dominates
FEATURES = 6
REFIT_EVERY = 32  # steps
MEMORY_STEPS = 300  # of the fit: older steps fade
SWEEPS = 12
SETTLED = 32  # steps of a kind before a wrong prediction may mean that the machine has another speed
DRIFT = 1 / 16  # of that speed, per step
RIDGE = 1.02  # holds the time of a row down where the steps do not show it
EMPTY = 1e-20  # a sum of squares of 1 / us below this is no data
FAR = 2.0  # factor between predicted and measured time that noise does not explain
FEW = 16  # a draft in so many rows changes the time little
RECENT = 8  # steps that the times of drafts are the mean of
IN_A_ROW = 5  # so many steps that are FAR too slow: the machine is slower, not a stall
LATELY = 32  # steps by which the present load is judged
SLACK = 1.5  # for noise, in bounds of one step's time by another's
WEIGHTS_KV = 4_096  # at least so many tokens of KV are read in the time of the weights, in any model
TOKEN_PAIRS = 1_024  # at least so many query-key pairs take as long as a token, likewise

Features = tuple[float, float, float, float, float, float]
Kind = tuple[bool, int]
Sums = list[list[float]]


class CostModel:
    """An on-line estimate of step_us: speed * (coefficients . features). No coefficient is below zero, so no
    step is predicted to take less time than a part of it.

    The coefficients are the least squares fit of the relative errors of the last few hundred steps, found
    by coordinate descent. `speed` follows a machine that becomes slower or faster as a whole; steps of a kind
    that is new teach the fit alone, since it may be the fit that errs.

    A further token takes at most SLACK times as long as one of any step seen: else a step of 257 tokens, one
    above the knot, could make those of 512 seem forty times as long.

    A machine that is never idle has steps of one size only, which do not show what a chunk adds to decodes.
    So the last step of each kind (with or without chunks, by powers of two of its tokens) never fades.

    A step that is far faster than predicted is trusted at once. A step that is far slower may be a stall, and
    is not trusted alone (`_doubt`). So a prediction that is too high is corrected by the first step that is
    faster; until then such steps are tried in smaller parts.
    """

    def __init__(self) -> None:
        self.seen = 0  # steps observed
        self.error_pm = 0  # EWMA of |predicted - real| / real, per mille
        self.loop_us = 0  # EWMA, see observe_loop
        self._host_row_us = 0.0
        self._speed = 1.0
        self._fit = [0.0] * FEATURES
        self._recent: list[list[float]] = []  # features / took, not yet in the sums
        self._kinds: dict[Kind, tuple[StepShape, float]] = {}  # the last step of each kind, and its time
        self._doubted: dict[Kind, tuple[StepShape, float]] = {}  # the last one if it was FAR too slow
        self._slow: list[float] = []  # measured / predicted of the last steps, while they are FAR too slow
        self._slowed = 1.0  # the part of `_speed` from a slowdown, which may end
        self._counts: dict[Kind, int] = {}  # steps observed of each kind
        self._moments = [[0.0] * FEATURES for _ in range(FEATURES)]
        self._targets = [0.0] * FEATURES

    def predict_us(self, shape: StepShape) -> int:
        """Predicted time of a step of this shape; 0 before the first observation."""
        return int(self._predict(_features(shape)))

    def can_predict(self, shape: StepShape) -> bool:
        """True if steps of this kind were seen, and the last one was not doubted."""
        return (kind := _kind(shape)) in self._kinds and kind not in self._doubted

    def observe(self, shape: StepShape, took_us: int) -> None:
        """Learn from a step of this shape that took `took_us` on the device."""
        if took_us <= 0:
            return
        features, kind = _features(shape), _kind(shape)
        self._counts[kind] = count = self._counts.get(kind, 0) + 1
        predicted = self._predict(features)
        if predicted > 0:
            error_pm = int(1_000 * abs(predicted - took_us) / took_us)
            self.error_pm += (error_pm - self.error_pm) // 16 if self.seen else error_pm
            self._follow(took_us / predicted, count)
        self.seen += 1
        took, predicted = took_us / self._speed, self._predict(features) / self._speed
        if took > FAR * predicted:
            self._doubt(kind, shape, took, predicted or took)
            return
        self._doubted.pop(kind, None)
        self._kinds[kind] = shape, took
        self._remember(features, took)
        far = FAR * took < predicted
        if self._lower(shape, took) or far or len(self._recent) == REFIT_EVERY or count & (count - 1) == 0:
            self._refit()

    def _follow(self, ratio: float, count: int) -> None:
        """Update the machine's speed from a step that took `ratio` times the prediction."""
        self._slow = [*self._slow, ratio] if ratio > FAR else []
        if len(self._slow) == IN_A_ROW:
            self._slow_down(min(self._slow))
            self._slow = []
        elif ratio * FAR < 1.0 < self._slowed:
            self._slow_down(max(ratio, 1.0 / self._slowed))  # the slowdown is over
        elif count >= SETTLED:
            ratio = 0.5 if ratio < 0.5 else 2.0 if ratio > 2.0 else ratio  # limits the weight of one outlier
            self._speed *= 1.0 + DRIFT * (ratio - 1.0)

    def _slow_down(self, times: float) -> None:
        self._speed *= times
        self._slowed *= times

    def _doubt(self, kind: Kind, shape: StepShape, took: float, predicted: float) -> None:
        """A step was far slower than predicted: a stall, or a gap in the fit.

        For a known kind, a single such step is ignored; after two in a row the faster one is trusted. The
        first step of a kind counts with the geometric mean of its time and the prediction: the least wrong
        value if either may be true.
        """
        before, self._doubted[kind] = self._doubted.get(kind), (shape, took)
        most = min(took, self._most(kind, shape))
        if before is not None:
            earlier, earlier_took = before
            ratio = earlier_took * self._speed / max(self._predict(_features(earlier)), 1.0)
            took = min(most, predicted * ratio)
            self._remember(_features(shape), took)
        elif kind not in self._kinds:
            took = sqrt(predicted * most)
        else:
            return
        self._kinds[kind] = shape, took
        self._refit()

    def _most(self, kind: Kind, shape: StepShape) -> float:
        """An upper bound of the time of a step of this shape, from the last step of each other kind."""
        others = [step for other, step in self._kinds.items() if other != kind]
        return min((SLACK * took * _times(shape, other) for other, took in others), default=float("inf"))

    def _lower(self, seen: StepShape, took: float) -> bool:
        """Lower the remembered times of kinds that this step shows to be too long. True if there were any.
        Called for each step."""
        lowered, per_token = False, took / max(seen.tokens, 1)
        for kind, (shape, most) in self._kinds.items():
            doubted = kind in self._doubted
            if most > took and (doubted or most > per_token * shape.tokens):
                times = SLACK * _times(shape, seen)
                times = sqrt(times) if doubted else times
                if took * times < most:
                    self._kinds[kind], lowered = (shape, took * times), True
        return lowered

    def observe_loop(self, us: int) -> None:
        """Update the loop: `us` from the end of a step until the executor has the next plan."""
        self.loop_us += (us - self.loop_us) // 8 if self.loop_us else us

    def observe_host(self, rows: int, us: int) -> None:
        """Update the host's time for a host-fed row: it worked `us` on `rows` rows after a forward."""
        if rows > 0:
            each = us / rows
            self._host_row_us += (each - self._host_row_us) / 8 if self._host_row_us else each

    def host_us(self, rows: int) -> int:
        """Predicted time of the host for `rows` host-fed rows."""
        return int(rows * self._host_row_us)

    def _predict(self, features: Features) -> float:
        a, b, c, d, e, f = self._fit
        _, rows, tokens, many, kv, pairs = features
        return self._speed * (a + b * rows + c * tokens + d * many + e * kv + f * pairs)

    def _remember(self, features: Features, took_us: float) -> None:
        """Add one equation: coefficients . features / took = 1."""
        self._recent.append([x / took_us for x in features])

    def _refit(self) -> None:
        """Add the recent steps to the normal equations, and improve the fit by coordinate descent. The last
        step of each kind is added for this fit only: its remembered time may change."""
        keep, rows = 1.0 - len(self._recent) / MEMORY_STEPS, self._recent
        self._moments, self._targets = _added(self._moments, self._targets, rows, keep)
        self._recent = []
        kinds = [self._kinds[kind] for kind in sorted(self._kinds)]
        rows = [[x / took for x in _features(shape)] for shape, took in kinds]
        moments, targets = _added(self._moments, self._targets, rows, 1.0)
        fit = self._fit
        steepest = SLACK * min((256 * took / max(shape.tokens, 1) for shape, took in kinds), default=0.0)
        for _ in range(SWEEPS):
            for i, row in enumerate(moments):
                if row[i] > EMPTY:
                    a, b, c, d, e, f = fit
                    r, s, t, u, v, w = row
                    gradient = a * r + b * s + c * t + d * u + e * v + f * w - targets[i]
                    better = fit[i] - gradient / row[i]
                    if i == 1:  # steps that all have one row show the constant
                        better = (fit[i] * row[i] - gradient) / (row[i] * RIDGE)
                    elif i == 3:  # above the last knot a token costs the third and the fourth coefficient
                        better = min(better, steepest - c)
                    elif i == 5:  # TOKEN_PAIRS pairs cost no more than a token
                        better = min(better, c + d)
                    fit[i] = better if better > 0.0 else 0.0


def _added(
    moments: Sums, targets: list[float], rows: list[list[float]], keep: float
) -> tuple[Sums, list[float]]:
    """The normal equations times `keep`, plus these rows."""
    columns = list(zip(*rows, strict=True)) or [()] * FEATURES
    sums: Sums = [[0.0] * FEATURES for _ in range(FEATURES)]
    for i, column in enumerate(columns):
        for j in range(i, FEATURES):
            sums[i][j] = sums[j][i] = keep * moments[i][j] + _sum(map(mul, column, columns[j]))
    return sums, [keep * targets[i] + _sum(column) for i, column in enumerate(columns)]


def _kind(shape: StepShape) -> Kind:
    """With chunks or without, by powers of two of its tokens."""
    return shape.tokens > shape.rows, shape.tokens.bit_length()


def _times(shape: StepShape, other: StepShape) -> float:
    """How many times the other step does at least this one's work. On any machine this one takes no longer
    than that many of the other: time per unit of work does not rise with the size of a step."""
    return max(
        1.0,
        shape.tokens / max(other.tokens, 1),
        shape.rows / max(other.rows, 1),
        (shape.kv_tokens + WEIGHTS_KV) / (other.kv_tokens + WEIGHTS_KV),
        (shape.attention + TOKEN_PAIRS * shape.tokens)
        / (other.attention + TOKEN_PAIRS * max(other.tokens, 1)),
    )


def _sum(values: Iterable[float]) -> float:
    """The sum from left to right: `sum` compensates for rounding in some versions of Python only."""
    return reduce(add, values, 0.0)


def _features(shape: StepShape) -> Features:
    """The features of the linear estimate, scaled to the same order of magnitude."""
    tokens = shape.tokens
    return (
        1.0,
        shape.rows / 64,
        (tokens - KNOTS[0]) / 256 if tokens > KNOTS[0] else 0.0,
        (tokens - KNOTS[1]) / 256 if tokens > KNOTS[1] else 0.0,
        shape.kv_tokens / 65_536,
        shape.attention / 262_144,
    )


class DraftTimes:
    """How many times as long a step takes with drafts as without, by measured steps. The fit is a smooth
    function, but the time of a matrix product jumps: on an H200 it takes 1.3 times as long
    for 128 tokens as for 64.

    By powers of two of the rows without drafts, and half as large steps of the tokens with them; between and
    beyond these points as the fit has it, times its errors there."""

    def __init__(self) -> None:
        # the last one without drafts, time, steps, CostModel.seen then
        self._bare: dict[int, tuple[StepShape, float, int, int]] = {}
        self._points: dict[int, dict[int, tuple[float, float, int]]] = {}  # tokens / rows, times, steps

    def observe(self, costs: CostModel, shape: StepShape, whole: StepShape, took_us: int) -> None:
        """Learn from a step with the decodes of this shape, and with drafts this `whole` shape."""
        drafts = whole.rows - shape.rows
        size, bare_us, count = _size(shape.rows), float(took_us), 0
        if size in self._bare:
            last, bare_us, count, seen = self._bare[size]
            count = count if costs.seen - seen < RECENT else 1  # the fit between them may be wrong
            bare_us *= costs.predict_us(shape) / max(costs.predict_us(last), 1)
        if FEW * drafts <= shape.rows:
            took = took_us * costs.predict_us(shape) / max(costs.predict_us(whole), 1)
            self._bare[size] = shape, _nearer(bare_us, took, count), min(count + 1, RECENT), costs.seen
            return
        times = max(took_us / max(bare_us if count else costs.predict_us(shape), 1), 1.0)
        tokens, points = 1 + drafts / shape.rows, self._points.setdefault(size, {})
        at = ((shape.rows + drafts - 1) ** 2).bit_length()
        most, before, count = points.get(at, (tokens, times, 0))
        points[at] = _nearer(most, tokens, count), _nearer(before, times, count), min(count + 1, RECENT)

    def times_pm(self, costs: CostModel, shape: StepShape, drafts: int, *, again: bool) -> int:
        """The time of a step with the decodes of this shape and so many drafts, per mille of that without.
        `again`: see StepShape.with_drafts."""
        bare, wanted = max(costs.predict_us(shape), 1), 1 + drafts / shape.rows
        low, wrong = 1.0, 1.0  # the point below, and its time relative to that of the fit
        points = self._points.get(_size(shape.rows), {})
        for tokens, times, _ in (points[at] for at in sorted(points)):
            known = shape.with_drafts(int((tokens - 1) * shape.rows), again=again)
            error = times * bare / max(costs.predict_us(known), 1)
            if tokens >= wanted:
                part = (wanted - low) / (tokens - low) if tokens > low else 1.0
                wrong += part * (error - wrong)
                break
            low, wrong = tokens, error
        us = costs.predict_us(shape.with_drafts(drafts, again=again))
        return max(int(1_000 * wrong * us / bare), 1_000)


def _nearer(before: float, now: float, count: int) -> float:
    now = min(max(now, before / FAR), FAR * before)  # a stall
    return before + (now - before) / min(count + 1, RECENT)


def _size(tokens: int) -> int:
    return max(tokens - 1, 0).bit_length()


def chunk_tokens(
    costs: CostModel, with_prompt: Callable[[int], StepShape], bound_us: int, block_tokens: int, most: int
) -> int:
    """The most prompt tokens, a multiple of `block_tokens` and at most `most`, with which a step is predicted
    to stay within `bound_us`; 0 if none are. `with_prompt`: its shape with so many prompt tokens."""
    blocks = most // block_tokens  # tried first, since it often fits
    fits, over = 0, blocks + 1
    while over - fits > 1:
        if costs.predict_us(with_prompt(blocks * block_tokens)) <= bound_us:
            fits = blocks
        else:
            over = blocks
        blocks = (fits + over) // 2
    return fits * block_tokens


@dataclass(frozen=True, slots=True)
class Speed:
    """Sums over some steps of one mode."""

    steps: int
    rows: int
    us: int
    took_us: int


@dataclass(slots=True)
class StepPace:
    """The throughput of an executor in its overlap mode: rows with results and their time, while it had work.
    ../overlap.py compares modes by it."""

    mode: str = ""
    since_step: int = 0  # when the mode was chosen
    since_rows: int = 0  # rows that ran then
    had_host_fed: bool = False  # some of them were host-fed
    micro_batch: int = 1  # of the last step of two_batch; the next one is the other, first 0
    step_us: int = 0  # time of a step, a moving average
    chunk_us: int = 0  # time of its prompt chunks, likewise
    lead_us: int = 0  # by which a plan must precede the end of the step that runs: see overlap.py
    lead_spread_us: int = 0  # its mean deviation
    sampled: float = 0.0  # rows of the last steps, with decay
    early_ends: float = 0.0  # sequences that ended before their length, with decay
    crowded: bool = False  # more prompt tokens wait than a step may hold: wasted rows delay no other row
    steps: int = 0
    rows: int = 0
    us: int = 0
    took_us: int = 0  # time of the device in `us`
    last_us: int = 0  # the last result, 0 if the executor was idle after it
    probe_until: int = 0  # the probe of `single` lasts until this step
    measure_from: int = 0  # results from this step on belong to the probe
    probed_step: int = 0  # the end of the last probe
    before: Speed | None = None  # of the mode before the probe
    banned: str = ""  # a mode that was slower than single
    banned_until: int = 0

    @property
    def speed(self) -> Speed:
        """The sums since the last restart."""
        return Speed(self.steps, self.rows, self.us, self.took_us)

    def on_planned(self, now_us: int) -> None:
        """A step is planned with none in flight. Unless the last result led to it, the executor was idle."""
        if now_us != self.last_us:
            self.last_us = 0

    def note(self, step: int, rows: int, took_us: int, now_us: int, *, busy: bool) -> None:
        """Count a step with a result; `busy`: the executor has more work."""
        self.sampled += rows - self.sampled / LATELY
        self.early_ends -= self.early_ends / LATELY
        if self.steps >= 2 * LATELY:  # the older half counts half
            self.steps, self.rows = self.steps // 2, self.rows // 2
            self.us, self.took_us = self.us // 2, self.took_us // 2
        if step == self.measure_from:
            self.restart()
        elif self.last_us:
            self.steps += 1
            self.rows += rows
            self.took_us += took_us
            self.us += now_us - self.last_us
        self.last_us = now_us if busy else 0

    def note_step(self, took_us: int, predicted_us: int, chunk_us: int = 0) -> None:
        """Update the averages with a step's time and that of its prompt chunks. A stall counts at most twice
        the prediction (0: not predicted)."""
        counted_us = min(took_us, int(FAR * predicted_us)) if predicted_us else took_us
        self.step_us += (counted_us - self.step_us) // 8 if self.step_us else counted_us
        self.chunk_us += (min(chunk_us, counted_us) - self.chunk_us) // 8

    def observe_early_end(self) -> None:
        """Count a sequence that left before its length: each step ahead has a wasted row of it. Not counted
        if `crowded`."""
        self.early_ends += 0.0 if self.crowded else 1.0

    def restart(self) -> None:
        """Start a new measurement."""
        self.steps = self.rows = self.us = self.took_us = 0
