import signal

import pytest

from experiments.interruption import Interrupt


def test_a_second_ctrl_c_is_not_kept_and_the_handler_of_before_returns():
    before, said = signal.getsignal(signal.SIGINT), []
    with Interrupt(said.append) as interrupt:
        interrupt.begin()  # as by a trainer that is set up twice
        assert not interrupt.asked
        signal.raise_signal(signal.SIGINT)
        assert interrupt.asked
        assert len(said) == 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
