"""The stored form of masks and the operations on it: functions from BlockSet to BlockSet.

Nothing here is public. grid and intervals are the arithmetic, bit_tiles the element masks,
block_set the stored form; the other modules are its operations.
"""
