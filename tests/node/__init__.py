"""Tests of the memory that the engines of a node share."""
