"""Tests of the site that is made of the pages."""
