"""The mathematics of variance-controlled off-policy training, on plain numbers.

VCPO decides about an optimizer step from four numbers per trajectory: its log importance weight,
its length, its reward and the norm of its gradient. The functions of this package compute these
decisions. They use no tensors, clocks, files, sockets or logs. Arguments may be Python numbers,
numpy arrays or torch tensors, of any dtype and on any device.

Source of the method: VCPO, "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs", arXiv
2602.17616. Each module names its equations and how it differs from the released code.
"""
