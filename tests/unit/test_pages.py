"""Pages are counted, shared by prefix, and evicted in the right order."""

from __future__ import annotations

import random

import pytest

from workers.engine.pages import PagePool


def chain(pool: PagePool, tokens: list[int]) -> list[int]:
    """Take and register pages for ``tokens``, as a sequence that computes them does."""
    size = pool.page_size
    pages = pool.take(len(tokens) // size)
    node = pool.root
    for number, page in enumerate(pages):
        node = pool.register(node, tuple(tokens[number * size : (number + 1) * size]), [page])
    return pages


def found(pool: PagePool, tokens: list[int]) -> list[int]:
    """The pages of the known beginning, in the only group."""
    (pages,) = pool.find(tokens).pages
    return pages


def test_the_null_page_is_never_handed_out() -> None:
    pool = PagePool(5, 4)
    assert pool.capacity == pool.free == 4
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert (pool.free, pool.usage_ratio) == (0, 1.0)


def test_a_prefix_is_found_page_by_page() -> None:
    pool = PagePool(20, 2)
    pages = chain(pool, [1, 2, 3, 4, 5, 6])
    assert found(pool, [1, 2, 3, 4, 5, 6, 7]) == pages
    assert found(pool, [1, 2, 3, 4, 5]) == pages[:2]
    assert found(pool, [1, 2, 9, 4]) == pages[:1]
    assert found(pool, [3, 4]) == []  # the same tokens, but not from the beginning
    assert found(pool, []) == []


def test_idle_pages_are_found_until_they_are_evicted_the_end_of_the_oldest_chain_first() -> None:
    pool = PagePool(7, 2)
    old, new = chain(pool, [1, 2, 3, 4, 5, 6]), chain(pool, [7, 8, 9, 10, 11, 12])
    pool.give_back(old)
    pool.give_back(new)
    assert pool.free == 6
    pool.take(2)
    assert found(pool, [1, 2, 3, 4, 5, 6]) == old[:1]
    assert found(pool, [7, 8, 9, 10, 11, 12]) == new


def test_a_held_page_is_not_evicted_and_using_a_prefix_makes_it_young() -> None:
    pool = PagePool(5, 2)
    first, second = chain(pool, [1, 2, 3, 4]), chain(pool, [5, 6, 7, 8])
    pool.give_back(first)
    pool.give_back(second)
    pool.hold(found(pool, [1, 2, 3, 4]))
    pool.take(2)
    assert pool.free == 0
    assert found(pool, [1, 2, 3, 4]) == first
    assert found(pool, [5, 6]) == []


def test_a_twin_stays_its_holders_own() -> None:
    pool = PagePool(9, 2)
    first, twin = chain(pool, [1, 2, 3, 4]), chain(pool, [1, 2, 3, 4])
    assert found(pool, [1, 2, 3, 4]) == first
    pool.give_back(twin)
    pool.give_back(first)
    assert pool.free == 8
    assert found(pool, [1, 2, 3, 4]) == first


def test_after_an_update_of_the_weights_nothing_is_found() -> None:
    pool = PagePool(9, 2)
    held, idle = chain(pool, [1, 2, 3, 4]), chain(pool, [5, 6])
    pool.give_back(idle)
    pool.forget()
    assert found(pool, [1, 2, 3, 4]) == found(pool, [5, 6]) == []
    pool.give_back(held)
    assert pool.free == 8


def test_no_page_leaks_in_a_thousand_random_steps() -> None:
    rng = random.Random(5)
    pool = PagePool(40, 2)
    held: list[list[int]] = []
    for _ in range(1000):
        if held and (rng.random() < 0.4 or pool.free < 6):
            pool.give_back(held.pop(rng.randrange(len(held))))
            continue
        tokens = [rng.randrange(2) for _ in range(10)]
        prefix = pool.find(tokens)
        (known,) = prefix.pages
        pool.hold(known)
        rest = pool.take(5 - len(known))
        node = prefix.node
        for number, page in enumerate(rest, len(known)):
            node = pool.register(node, tuple(tokens[2 * number : 2 * number + 2]), [page])
        held.append(known + rest)
        owned = {page for pages in held for page in pages}
        assert 0 not in owned
        assert pool.free == pool.capacity - len(owned)
    for pages in held:
        pool.give_back(pages)
    assert pool.free == pool.capacity


# Groups of layers: the first sees everything, the second four tokens back


def windowed_chain(pool: PagePool, tokens: list[int]) -> list[list[int]]:
    groups = [pool.take(len(tokens) // 2) for _ in pool.windows]
    node = pool.root
    for number, pages in enumerate(zip(*groups, strict=True)):
        node = pool.register(node, tuple(tokens[2 * number : 2 * number + 2]), pages)
    return groups


def test_a_prefix_needs_every_page_of_a_full_group_and_only_the_window_of_the_other() -> None:
    pool = PagePool(20, 2, windows=[None, 4])
    full, sliding = windowed_chain(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    pool.give_back(sliding[:2])  # behind the window of the next token: idle, still known
    prefix = pool.find([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert (prefix.length, prefix.pages) == (4, [full, [0, 0, *sliding[2:]]])
    assert pool.find([1, 2, 3, 4]).pages == [full[:2], sliding[:2]]
    pool.take(pool.free)  # the idle pages are written by others
    assert pool.find([1, 2, 3, 4, 5, 6, 7, 8, 9]).pages == [full, [0, 0, *sliding[2:]]]
    assert pool.find([1, 2, 3, 4]).length == 0  # here they are inside the window


def test_without_its_full_pages_a_chain_is_not_found_whatever_is_left_of_the_sliding_ones() -> None:
    pool = PagePool(20, 2, windows=[None, 4])
    full, sliding = windowed_chain(pool, [1, 2, 3, 4, 5, 6])
    pool.give_back(full)
    pool.take(pool.free)
    assert pool.find([1, 2, 3, 4, 5, 6]).length == 0
    pool.give_back(sliding)
    assert pool.free == 3


@pytest.mark.parametrize(
    ("tokens", "chunk", "pages"),
    [(8, 8, 8), (100, 1, 50 + 3), (100, 8, 50 + 7), (3, 64, 4)],
)
def test_the_most_that_a_sequence_holds_at_once(tokens: int, chunk: int, pages: int) -> None:
    """50 pages of 2 in the full group; in the other the window of 4 and the chunk, wherever they begin in a page."""
    assert PagePool(200, 2, windows=[None, 4]).pages_at_most(tokens, chunk) == pages


def test_no_page_leaks_with_windows_in_a_thousand_random_steps() -> None:
    rng = random.Random(6)
    pool = PagePool(60, 2, windows=[None, 4, 3])
    held: list[list[list[int]]] = []
    for _ in range(1000):
        if held and (rng.random() < 0.4 or pool.free < 20):
            for pages in held.pop(rng.randrange(len(held))):
                pool.give_back(pages)
            continue
        tokens = [rng.randrange(2) for _ in range(10)]
        prefix = pool.find(tokens)
        groups = prefix.pages
        for pages in groups:
            pool.hold(pages)
        node = prefix.node
        for number in range(prefix.length, 5):
            new = pool.take(len(groups))
            node = pool.register(node, tuple(tokens[2 * number : 2 * number + 2]), new)
            for group, (pages, page) in enumerate(zip(groups, new, strict=True)):
                pages.append(page)
                first = pool.first_seen(group, 2 * number + 2)
                pool.give_back(pages[:first])
                pages[:first] = [0] * first
        held.append(groups)
        owned = {page for groups in held for pages in groups for page in pages} - {0}
        assert pool.free == pool.capacity - len(owned)
    for groups in held:
        for pages in groups:
            pool.give_back(pages)
    assert pool.free == pool.capacity
