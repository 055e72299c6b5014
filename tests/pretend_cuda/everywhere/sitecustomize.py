"""With this folder in PYTHONPATH, every Python process has the pretend CUDA device, as on a machine with two GPUs."""

from pretend_cuda.device import install_pretend

install_pretend()
