"""Choosing a kernel for a problem and a device. Pure functions; no torch, no driver."""
