"""Engines of TensorRT and TensorRT-RTX: one module for both packages."""
