"""Tests, and what they share: helpers."""
