// IndexPool's kernel for tests/plugins/test_index_pool_kernel.py.
#include "index_pool/kernel.cuh"

extern "C" {
int launch(const edgepool::index_pool::Params* p) { return edgepool::index_pool::launch(*p); }
const char* problem(const edgepool::index_pool::Params* p) {
  return edgepool::index_pool::problem(*p);
}
}
