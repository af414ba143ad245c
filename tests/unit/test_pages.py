"""Pages are counted, shared by prefix, and evicted in the right order."""

from __future__ import annotations

import random

from workers.engine.pages import PagePool


def chain(pool: PagePool, tokens: list[int]) -> list[int]:
    """Take and register pages for ``tokens``, as a sequence that computes them does."""
    size = pool.page_size
    pages = pool.take(len(tokens) // size)
    node = pool.root
    for number, page in enumerate(pages):
        node = pool.register(page, node, tuple(tokens[number * size : (number + 1) * size]))
    return pages


def test_the_null_page_is_never_handed_out() -> None:
    pool = PagePool(5, 4)
    assert pool.capacity == pool.free == 4
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert (pool.free, pool.usage_ratio) == (0, 1.0)


def test_a_prefix_is_found_page_by_page() -> None:
    pool = PagePool(20, 2)
    pages = chain(pool, [1, 2, 3, 4, 5, 6])
    assert pool.find([1, 2, 3, 4, 5, 6, 7]).pages == pages
    assert pool.find([1, 2, 3, 4, 5]).pages == pages[:2]
    assert pool.find([1, 2, 9, 4]).pages == pages[:1]
    assert pool.find([3, 4]).pages == []  # the same tokens, but not from the beginning
    assert pool.find([]).pages == []


def test_idle_pages_are_found_until_they_are_evicted_the_end_of_the_oldest_chain_first() -> None:
    pool = PagePool(7, 2)
    old, new = chain(pool, [1, 2, 3, 4, 5, 6]), chain(pool, [7, 8, 9, 10, 11, 12])
    pool.give_back(old)
    pool.give_back(new)
    assert pool.free == 6
    pool.take(2)
    assert pool.find([1, 2, 3, 4, 5, 6]).pages == old[:1]
    assert pool.find([7, 8, 9, 10, 11, 12]).pages == new


def test_a_held_page_is_not_evicted_and_using_a_prefix_makes_it_young() -> None:
    pool = PagePool(5, 2)
    first, second = chain(pool, [1, 2, 3, 4]), chain(pool, [5, 6, 7, 8])
    pool.give_back(first)
    pool.give_back(second)
    found = pool.find([1, 2, 3, 4])
    pool.hold(found.pages)
    pool.take(2)
    assert pool.free == 0
    assert pool.find([1, 2, 3, 4]).pages == first
    assert pool.find([5, 6]).pages == []


def test_a_twin_stays_its_holders_own() -> None:
    pool = PagePool(9, 2)
    first, twin = chain(pool, [1, 2, 3, 4]), chain(pool, [1, 2, 3, 4])
    assert pool.find([1, 2, 3, 4]).pages == first
    pool.give_back(twin)
    pool.give_back(first)
    assert pool.free == 8
    assert pool.find([1, 2, 3, 4]).pages == first


def test_after_an_update_of_the_weights_nothing_is_found() -> None:
    pool = PagePool(9, 2)
    held, idle = chain(pool, [1, 2, 3, 4]), chain(pool, [5, 6])
    pool.give_back(idle)
    pool.forget()
    assert pool.find([1, 2, 3, 4]).pages == pool.find([5, 6]).pages == []
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
        found = pool.find(tokens)
        pool.hold(found.pages)
        rest = pool.take(5 - len(found.pages))
        node = found.node
        for number, page in enumerate(rest, len(found.pages)):
            node = pool.register(page, node, tuple(tokens[2 * number : 2 * number + 2]))
        held.append(found.pages + rest)
        owned = {page for pages in held for page in pages}
        assert 0 not in owned
        assert pool.free == pool.capacity - len(owned)
    for pages in held:
        pool.give_back(pages)
    assert pool.free == pool.capacity
