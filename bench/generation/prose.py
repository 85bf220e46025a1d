"""Openings of English books in the public domain: prose, which is far from what the demo pair was trained on."""

from __future__ import annotations

PASSAGES: dict[str, str] = {
    "austen": "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in "
    "want of a wife. However little known the feelings or views of such a man may be on his first entering a "
    "neighbourhood, this truth is so well fixed in the minds of the surrounding families, that he is considered as "
    "the rightful property of some one or other of their daughters.",
    "dickens": "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of "
    "foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the "
    "season of Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had "
    "nothing before us,",
    "carroll": "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to "
    "do: once or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in "
    "it, “and what is the use of a book,” thought Alice “without pictures or conversations?”",
    "melville": "Call me Ishmael. Some years ago—never mind how long precisely—having little or no money in my purse, "
    "and nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of "
    "the world. It is a way I have of driving off the spleen and regulating the circulation.",
    "doyle": "To Sherlock Holmes she is always the woman. I have seldom heard him mention her under any other name. In "
    "his eyes she eclipses and predominates the whole of her sex. It was not that he felt any emotion akin to love for "
    "Irene Adler. All emotions, and that one particularly, were abhorrent to his cold, precise but admirably balanced "
    "mind.",
    "wells": "No one would have believed in the last years of the nineteenth century that this world was being "
    "watched keenly and closely by intelligences greater than man’s and yet as mortal as his own; that as men busied "
    "themselves about their various concerns they were scrutinised and studied,",
    "shelley": "You will rejoice to hear that no disaster has accompanied the commencement of an enterprise which you "
    "have regarded with such evil forebodings. I arrived here yesterday, and my first task is to assure my dear sister "
    "of my welfare and increasing confidence in the success of my undertaking.",
    "stoker": "Left Munich at 8:35 P.M., on 1st May, arriving at Vienna early next morning; should have arrived at "
    "6:46, but train was an hour late. Buda-Pesth seems a wonderful place, from the glimpse which I got of it from the "
    "train and the little I could walk through the streets. I feared to go very far from the station,",
}
