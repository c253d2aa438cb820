import numpy as np

from experiments.long_documents.floors import word_buckets
from experiments.long_documents.words import FIRST_WORD, word_ids, words


def of(text):
    return np.frombuffer(text, np.uint8)


def test_ids_are_words_and_marks_in_order():
    text = of(b"It was -- 7\xc3\xa9 a\nNIGHT.")
    ids = word_ids(text)
    marks = [ord("-"), ord("-"), ord("7"), 0xC3, 0xA9, ord(".")]
    places = [2, 3, 4, 5, 6, 9]
    assert ids[places].tolist() == [mark + 1 for mark in marks]
    found = np.delete(ids, places)
    assert found.tolist() == (word_buckets(text) + FIRST_WORD).tolist()
    assert len(set(found.tolist())) == 4
    assert word_ids(of(b"it WAS")).tolist() == found[:2].tolist()


def test_ids_of_texts_without_words_or_anything():
    assert word_ids(of(b" \n\t")).tolist() == word_ids(of(b"")).tolist() == []
    assert word_ids(of(b"7 8")).tolist() == [ord("7") + 1, ord("8") + 1]


def test_words_begin_where_they_stand():
    begins, buckets = words(of(b" saw was saw"))
    assert begins.tolist() == [1, 5, 9]
    assert buckets[0] == buckets[2] != buckets[1]
