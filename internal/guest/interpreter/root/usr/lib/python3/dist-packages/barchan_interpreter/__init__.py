"""The code interpreter of a sandbox: a server for E2B's client, over Jupyter kernels."""
