"""With this folder in PYTHONPATH, every Python process has the pretend CUDA device, as on a machine with two GPUs."""

from pretend_cuda.device import install_pretend

if __name__ == "sitecustomize":  # as Python imports it at its start; under another name a test only looks for examples in it
    install_pretend()
