"""Checks that an auditor makes, driven the same way against this library and others that train with differential privacy."""
