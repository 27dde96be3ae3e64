"""A seeded grammar of short stories: text to train a tiny language model on, with no download.

A story has a hero, a friend, a place and a thing. A thing that is lost early is found late, colours and names stay the
same, and feelings follow from what happened. So a model has to look back to predict well, and the held-out loss tells
whether it does. Every story follows from one integer.

    >>> story(7) == story(7)
    True
    >>> len({story(seed) for seed in range(1000)})
    1000
"""

from __future__ import annotations

import random

GIRLS = "Ada Bella Cora Dina Ella Fay Gwen Hana Ida June Kira Lily Mia Nora Olga Pia Sara Tess Una Wren Zoe".split()
BOYS = "Abe Ben Carl Dan Eli Finn Gus Hugo Ivan Jack Karl Leo Max Ned Otto Paul Ralf Sam Tom Udo Vic Will Zack".split()
ANIMALS = "fox bear rabbit mouse owl frog duck cat dog hen goat pony turtle squirrel hedgehog badger".split()
NATURE = "little wise quick shy brave clever gentle sleepy hungry proud".split()
COLOURS = "red blue green yellow white black brown silver golden purple".split()
THINGS = "ball kite hat drum key boat bell cup scarf book lamp shoe basket button whistle ring".split()
PLACES = {
    "the forest": ("under a tall tree", "behind a mossy stone", "in a hollow log"),
    "the garden": ("under the rose bush", "behind the shed", "in the long grass"),
    "the river": ("under the bridge", "between two rocks", "in the reeds"),
    "the hill": ("behind the windmill", "under a flat stone", "in a fox hole"),
    "the market": ("under a table", "behind a cart", "in a box of apples"),
    "the beach": ("under the pier", "behind a dune", "in a heap of shells"),
    "the farm": ("in the hay", "behind the barn", "under a bucket"),
    "the park": ("under the slide", "behind a bench", "in the sand"),
}
WEATHER = {
    "sunny": ("The sun was warm and bright.", "There was not one cloud in the sky."),
    "rainy": ("The rain fell softly on the roofs.", "There were puddles everywhere."),
    "windy": ("The wind blew through the trees.", "Leaves danced in the air."),
    "snowy": ("Snow lay on the ground.", "The air was cold and clear."),
}
FOODS = "apples bread soup cake berries cheese honey pears".split()
HOMES = ("a small house", "a tiny hut", "a yellow house", "a house with a round door")
WISHES = ("to play with it every day", "to show it to everyone", "to keep it forever", "to take it to bed at night")


class _Teller:
    """Draws the cast of a story, and writes sentences about the cast."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        pick = self.pick
        self.girl = pick((True, False))
        self.hero = pick(GIRLS if self.girl else BOYS)
        self.she, self.her, self.hers = ("she", "her", "her") if self.girl else ("he", "him", "his")
        self.She, self.Her = self.she.capitalize(), self.hers.capitalize()
        self.animal, self.nature = pick(ANIMALS), pick(NATURE)
        self.friend = pick([name for name in GIRLS + BOYS if name != self.hero])
        self.colour, self.thing = pick(COLOURS), pick(THINGS)
        self.it = f"{self.colour} {self.thing}"
        self.place = pick(list(PLACES))
        self.spots = self.random.sample(PLACES[self.place], 3)
        self.weather = pick(list(WEATHER))
        self.food = pick(FOODS)

    def pick(self, options):
        return self.random.choice(list(options))

    def opening(self) -> list[str]:
        age = self.pick(("little girl", "young girl", "girl") if self.girl else ("little boy", "young boy", "boy"))
        first = self.pick(
            (
                f"Once upon a time, there was a {age} named {self.hero}.",
                f"One day, a {age} named {self.hero} went to {self.place}.",
                f"{self.hero} was a {age} who lived in {self.pick(HOMES)} near {self.place}.",
            )
        )
        loves = self.pick(
            (
                f"{self.She} had a {self.it} and loved it very much.",
                f"{self.Her} best thing was a {self.it}.",
                f"For {self.hers} birthday, {self.she} got a {self.it}. {self.She} wanted {self.pick(WISHES)}.",
            )
        )
        sky = f"It was a {self.weather} day. {self.pick(WEATHER[self.weather])}"
        return [first, loves, sky] if self.random.random() < 0.6 else [first, loves]

    def meeting(self) -> list[str]:
        return [
            self.pick(
                (
                    f"At {self.place}, {self.she} met a {self.nature} {self.animal} named {self.friend}.",
                    f"Then a {self.nature} {self.animal} came along. "
                    f'"My name is {self.friend}," said the {self.animal}.',
                    f"There {self.she} saw {self.friend}, a {self.nature} {self.animal}.",
                )
            )
        ]

    def lost(self) -> list[str]:
        how = {
            "sunny": "While they were resting in the sun",
            "rainy": "While they were running from the rain",
            "windy": "Then the wind took hold of it, and",
            "snowy": "While they were playing in the snow",
        }[self.weather]
        gone = f"{how}, the {self.thing} was gone." if not how.endswith("and") else f"{how} the {self.thing} was gone."
        sad = self.pick(
            (
                f"{self.hero} was very sad and began to cry.",
                f'"Oh no! Where is my {self.it}?" said {self.hero}.',
                f"{self.hero} looked left and right, but {self.she} could not see it.",
            )
        )
        help_ = self.pick(
            (
                f'"Do not be sad, {self.hero}," said {self.friend}. "I will help you."',
                f'"Let us look for it," said the {self.animal}.',
                f"{self.friend} wanted to help {self.her}.",
            )
        )
        tries = [
            f"They looked {spot}, but there was only a {self.pick(COLOURS)} {self.pick(THINGS)}."
            for spot in self.spots[:2]
        ]
        found = self.pick(
            (
                f"At last, they looked {self.spots[2]}, and there was the {self.it}!",
                f'"Look {self.spots[2]}!" said {self.friend}. There it was, the {self.it}.',
            )
        )
        return [gone, sad, help_, *tries[: self.pick((1, 2))], found]

    def shared(self) -> list[str]:
        ask = self.pick(
            (
                f'"May I play with your {self.thing}?" asked the {self.animal}.',
                f'{self.friend} looked at the {self.it}. "Can I have a turn?"',
            )
        )
        if self.pick((True, False)):
            return [
                ask,
                f'"No, it is mine!" said {self.hero}. {self.friend} was sad and went away.',
                f"Soon {self.hero} felt alone. {self.She} ran after the {self.animal}.",
                f'"I am sorry, {self.friend}," {self.she} said. "Let us play with the {self.thing} together."',
            ]
        return [
            ask,
            f'"Yes, you may," said {self.hero}, and gave the {self.it} to {self.friend}.',
            f'The {self.animal} was so glad. "You are kind, {self.hero}," said {self.friend}.',
        ]

    def broken(self) -> list[str]:
        return [
            f"But {self.she} was not careful, and the {self.thing} broke in two.",
            self.pick(
                (f"{self.hero} held the two parts and was sad.", f'"My {self.it} is broken," cried {self.hero}.')
            ),
            f"{self.friend} had an idea. The {self.animal} went home "
            f"and came back with glue and a {self.pick(COLOURS)} string.",
            f"They worked until the {self.thing} was whole again.",
        ]

    def ending(self) -> list[str]:
        thanks = self.pick(
            (
                f'"Thank you, {self.friend}!" said {self.hero}.',
                f"{self.hero} hugged the {self.animal}.",
                f"{self.hero} was happy, and so was {self.friend}.",
            )
        )
        meal = f"Then they sat down and ate {self.food} together."
        last = self.pick(
            (
                f"From that day on, {self.hero} and the {self.nature} {self.animal} were best friends.",
                f"When {self.hero} went home, {self.she} put the {self.it} next to {self.hers} bed.",
                f"And {self.hero} never forgot {self.friend}, the {self.nature} {self.animal}.",
                f"That night, {self.hero} dreamed of {self.place} and of {self.friend}.",
            )
        )
        return [thanks, meal, last] if self.random.random() < 0.5 else [thanks, last]


def story(seed: int) -> str:
    """Story number `seed`, one paragraph of ASCII text."""
    teller = _Teller(seed)
    middle = teller.pick((teller.lost, teller.shared, teller.broken))
    return " ".join(teller.opening() + teller.meeting() + middle() + teller.ending())


if __name__ == "__main__":
    for number in range(3):
        print(story(number), end="\n\n")
