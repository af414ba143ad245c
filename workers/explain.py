"""What an engine did, told step by step: who came and who left, the packed row, and what each of its tokens may see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from rich.text import Text

from batchjobs.text import plural
from workers.grid import Grid, View, colour
from workers.step_log import Admitted, Event, GaveWay, Left, Part, Step, StepLog, chapters

NAME_CELLS = 40
MAX_EVENTS = 12  # told of one step


def explain(log: StepLog, view: View, *, pictures: int) -> Iterator[Text]:
    """A picture of the first eventful steps, ``pictures`` at most, and a few words on the steps between them."""
    yield from _legend(view)
    shown = 0
    for step, following in islice(chapters(log.steps), pictures):
        yield Text()
        yield from _drawn(step, view)
        yield from _going_on(following, view)
        shown += 1 + len(following)
    left = sum(step.computed is not None for step in log.steps) - shown
    if left > 0:
        yield Text()
        yield Text(f"{plural(left, 'more step')} not shown")


def _legend(view: View) -> Iterator[Text]:
    marks = view.marks
    yield Text(f"Rows are tokens, columns keys: {marks.seen} is a key that the row sees, a number counts earlier ones.")
    if len(set(view.windows)) > 1:
        yield Text(f"{marks.wide} is seen only by the layers with the wider window.")


def _drawn(step: Step, view: View) -> Iterator[Text]:
    answers, prompts = step.num_rows - step.prompt_rows, step.prompt_rows
    kinds = [f"{answers} decode"] * (answers > 0) + [f"{prompts} prefill"] * (prompts > 0)
    if again := sum(part.again for part in step.parts):
        kinds.append(f"{again} computed before")
    yield Text(f"step {step.number}: {plural(step.num_rows, 'row')}, {', '.join(kinds)}", "bold")
    yield from _told(step.before, view)
    yield from Grid(step, view).lines()
    yield _pages(step, view)
    yield from _told(step.after, view)


def _pages(step: Step, view: View) -> Text:
    """The pages that hold the keys, by sequence and then by group of layers; - for one behind the window."""
    words = []
    for index, part in enumerate(step.parts):
        tables = [
            " ".join(str(page) if page else "-" for page in rows.tables[index][: _pages_of(part, rows.page_size)])
            for rows in step.rows
        ]
        words.append(f"{part.who.label} {' / '.join(tables)}")
    return Text(view.cut(f"  pages: {', '.join(words)}", view.width), "dim")


def _pages_of(part: Part, page_size: int) -> int:
    return -(-(part.first + part.count) // page_size)


def _going_on(steps: Sequence[Step], view: View) -> Iterator[Text]:
    if not steps:
        return
    yield Text()
    numbers = f"step {steps[0].number}" if len(steps) == 1 else f"steps {steps[0].number} to {steps[-1].number}"
    yield Text(f"{numbers}: {plural(len(steps[0].parts), 'row')}, one more token each", "bold")
    for index, part in enumerate(steps[0].parts):
        tokens = " ".join(view.token(step.parts[index].sampled) for step in steps)
        line = f"  {part.who.label} {view.marks.gives} {tokens}"
        yield Text(view.cut(line, view.width), colour(part.who))


# --------------------------------------------------------------------------------------------------------- events


def _told(events: Sequence[Event], view: View) -> Iterator[Text]:
    """A line for each; of very many the first ones."""
    shown = events if len(events) <= MAX_EVENTS else events[: MAX_EVENTS - 1]
    for event in shown:
        where = f"slot {event.slot}: " if event.slot >= 0 else ""
        if isinstance(event, Admitted):
            words = _admission(event, view)
        elif isinstance(event, GaveWay):
            words = _giving_way(event)
        else:
            words = _end(event, view)
        yield Text(view.cut(f"  {where}{words}", view.width), colour(event.who))
    if len(shown) < len(events):
        more = plural(len(events) - len(shown), "more sequence")
        yield Text(f"  {view.marks.more} {more} came, gave way or left", "dim")


def _admission(event: Admitted, view: View) -> str:
    label, previous = event.who.label, event.previous
    if event.is_again:
        words = f"{label} goes on with {event.cached + event.restored} of {plural(event.tokens, 'token')}"
        known = [f"{event.cached} found in the cache"] * (event.cached > 0)
        known += [f"{event.restored} from CPU memory"] * (event.restored > 0)
        words += f" ({', '.join(known)})" if known else ""
    else:
        words = f"admitted {label} ({view.cut(view.safe(event.who.name), NAME_CELLS)}), "
        if event.cached:
            words += f"{event.cached} of {plural(event.tokens, 'prompt token')} found in the cache"
        else:
            words += plural(event.tokens, "prompt token")
    return words if previous is None or previous is event.who else f"{words}; {previous.label} had it before"


def _giving_way(event: GaveWay) -> str:
    fate = "offloaded to CPU memory" if event.offloaded else "given up"
    return f"{event.who.label} preempted, the pages of its {plural(event.computed, 'token')} {fate}; free"


def _end(event: Left, view: View) -> str:
    free = "; free" if event.slot >= 0 else ""
    words = f"{event.who.label} left after {plural(event.tokens, 'token')} ({event.reason})"
    return words + free if event.error is None else f"{words}, {view.safe(event.error.message)}{free}"
