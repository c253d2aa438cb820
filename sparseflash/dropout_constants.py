"""Constants of dropout.py, without torch: a process that compiles kernels does not import it."""

GROUP = 64  # keys whose bits are drawn together
DIGITS = 16  # of the threshold, four for each call of philox
ROUNDS = 7  # the fewest that pass all tests of BigCrush: Salmon et al. 2011, table 2
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
