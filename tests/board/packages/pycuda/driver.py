"""`pycuda.driver` over an imitated GPU, for processes that tests start."""

from tests.runtime.fake_cuda import Gpu, fake_pycuda

GPU = Gpu()
globals().update(vars(fake_pycuda(GPU)))
