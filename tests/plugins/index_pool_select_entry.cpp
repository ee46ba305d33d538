// IndexPoolSelect's kernel for tests/plugins/test_index_pool_select_kernel.py.
#include "index_pool_select/kernel.cuh"

using edgepool::index_pool_select::Params;

extern "C" {
int launch(const Params* p) { return edgepool::index_pool_select::launch(*p); }
const char* problem(const Params* p) { return edgepool::index_pool_select::problem(*p); }
size_t workspace_bytes(const Params* p) { return edgepool::index_pool_select::workspace_bytes(*p); }
}
