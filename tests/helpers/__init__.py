"""What tests share. Every module stands alone: a test imports `tests.helpers.NAME`."""
