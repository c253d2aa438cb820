import time

from sparseflash.timing import median_ms


def test_a_time_is_in_milliseconds():
    assert 20 <= median_ms(lambda: time.sleep(0.02), seconds=0.1) < 200
