"""liblonghaul_ops.so in an ordinary PyTorch process.

    library_test.py path/to/liblonghaul_ops.so [TEST...]
"""

import sys
import unittest

import support
import torch

if __name__ == "__main__":
    support.LIBRARY = sys.argv.pop(1)
    torch.ops.load_library(support.LIBRARY)
    tests = sys.argv[1:] or ["operators_test", "bfloat16_test", "registration_test"]
    unittest.main(module=None, argv=[sys.argv[0], *tests])
