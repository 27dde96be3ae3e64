"""The drawings of docs/masks.md are those of the makers."""

import inspect

import masks_page

from flash_attn_minimal import masks


def test_the_drawings_are_current():
    assert masks_page.page_with(masks_page.drawings()) == masks_page.PAGE.read_text(), "run python tests/masks_page.py"


def test_every_maker_is_drawn():
    made = {name for name in masks.__all__ if inspect.isfunction(getattr(masks, name))}
    drawn = {name.partition(",")[0] for name in masks_page.DRAWN}
    assert drawn == made - {"shared_prompt_positions", "stack"}
